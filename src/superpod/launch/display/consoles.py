"""Create consoles whose output to a pipe or a file is not wrapped."""

from __future__ import annotations

import os
import sys
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

UNLIMITED = 100_000
"""Width for output to a pipe or a file, which is not wrapped."""


def console(file: IO[str] | None = None, *, highlight: bool = False) -> Console:
    """Return a console for `file` (default: stdout) that wraps to its terminal or to COLUMNS.

    Output to a file or a pipe is not wrapped. With `highlight`, numbers and strings are coloured.
    """
    from rich.console import Console

    if is_unlimited(file or sys.stdout):
        return Console(file=file, highlight=highlight, width=UNLIMITED)
    return Console(file=file, highlight=highlight)


def is_unlimited(file: IO[str]) -> bool:
    """Return whether output to `file` is not wrapped: programs such as grep need each table row on one line."""
    return not file.isatty() and "COLUMNS" not in os.environ


def print_plain(console: Console, text: str) -> None:
    """Print a line as it is: without Rich's markup, highlighting and wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
