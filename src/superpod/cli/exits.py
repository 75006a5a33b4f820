"""How a command ends that is interrupted."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import IO, NoReturn

INTERRUPTED = 130
"""Exit code, as of a process that SIGINT ended."""


def leave_interrupted(terminal: IO[str] | None = None) -> NoReturn:
    """Print that the command was interrupted on `terminal` (default: stderr), and exit at once.

    `sys.exit` does not serve: when an import is interrupted, Python ends by the signal all the same.
    """
    with contextlib.suppress(OSError):  # the terminal may be closed
        print("error: interrupted", file=terminal or sys.stderr, flush=True)
    os._exit(INTERRUPTED)
