"""A helper process that ends when the process that started it is gone. Standard library only, Python 3.9.

For processes that run Python all the time, such as the workers of a pool. What may hang outside Python, or has
children of its own, is ended from outside: `runtime/processes/orphans.py`.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

LOOK_S = 1.0
"""Seconds between two looks at the parent."""


def end_with_parent() -> None:
    """End this process within seconds of its parent, however that ends: kill -9 lets no handler of the parent run."""
    started_by = multiprocessing.parent_process()  # right even where that is gone already
    parent = started_by.pid if started_by and started_by.pid else os.getppid()
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)
