"""Pass the current stage of a long operation to the process that displays it, in a small file.

An environment variable, which child processes inherit, contains the path of the file.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

VARIABLE = "SUPERPOD_STAGE_FILE"


def note(text: str) -> None:
    """Record `text` as the current stage of the operation; do nothing if no process watches it."""
    name = os.environ.get(VARIABLE)
    if name:
        with contextlib.suppress(OSError):
            Path(name).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def watch() -> Iterator[Callable[[], str]]:
    """Yield a function that returns the newest stage that this process or its children recorded; "" = none yet."""
    old_value = os.environ.get(VARIABLE)
    with tempfile.TemporaryDirectory(prefix="recipes-stage-") as folder:
        path = Path(folder, "stage")
        os.environ[VARIABLE] = str(path)

        def newest() -> str:
            try:
                return path.read_text(encoding="utf-8")
            except OSError:
                return ""

        try:
            yield newest
        finally:
            os.environ.pop(VARIABLE, None)
            if old_value is not None:
                os.environ[VARIABLE] = old_value
