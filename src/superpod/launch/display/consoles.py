"""Consoles at any terminal width, whose output to a pipe or a file is not wrapped."""

from __future__ import annotations

import os
import sys
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

UNLIMITED = 100_000
"""Width for output to a pipe or a file, which is not wrapped."""


def console(file: IO[str] | None = None, *, highlight: bool = False) -> Console:
    """Return a console that wraps to its terminal or to COLUMNS; output to a file or a pipe is not wrapped."""
    from rich.console import Console

    if is_unlimited(file or sys.stdout):
        return Console(file=file, highlight=highlight, width=UNLIMITED)
    return Console(file=file, highlight=highlight)


def is_unlimited(file: IO[str]) -> bool:
    """Return whether output is not wrapped: line-based programs such as grep need each table row on one line."""
    return not file.isatty() and "COLUMNS" not in os.environ
