"""Exit from an interrupted command."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import IO, NoReturn

INTERRUPTED = 130
"""Exit code of a process that SIGINT terminated, as shells report it."""


def exit_interrupted(terminal: IO[str] | None = None) -> NoReturn:
    """Print "interrupted" to `terminal` (default: stderr) and exit at once with code 130.

    `sys.exit` is not enough: if an import is interrupted, the signal still terminates Python.
    """
    with contextlib.suppress(OSError):  # the terminal may be closed
        print("error: interrupted", file=terminal or sys.stderr, flush=True)
    os._exit(INTERRUPTED)
