"""What the command is given to print to: its streams, and the size of the terminal that the environment claims."""

from __future__ import annotations

import io
import os
import sys

from superpod.errors import UserError

CLAIMS = {"COLUMNS": range(20, 10_001), "LINES": range(1, 10_001)}
"""Sizes of a terminal that are taken from the environment; rich believes any, and prints nothing in 0 columns."""


def prepare() -> None:
    """Make the streams print what they can, at a size that text fits in; before rich and Typer read either.

    Raises:
        UserError: there is no stdout.
    """
    for name, sane in CLAIMS.items():
        claim = os.environ.get(name, "")
        if not (claim.isascii() and claim.isdigit() and len(claim) < 9 and int(claim) in sane):
            os.environ.pop(name, None)  # then the terminal itself is asked, and 80 columns are taken without one
    _print_what_it_can()
    if sys.stdout is None:  # print() would then do nothing, and the answer be lost
        raise UserError("standard output is closed, and the answer would be lost", "send it to a file, or to /dev/null")


def _print_what_it_can() -> None:
    """Let no letter end the command where the encoding lacks it; a C locale's terminal gets no bars and boxes.

    Python itself takes a C locale for UTF-8.
    """
    named = os.environ.get("LC_ALL") or os.environ.get("LANG")
    chosen = os.environ.get("PYTHONIOENCODING") or os.environ.get("PYTHONUTF8") == "1"
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        if named in ("C", "POSIX") and not chosen and stream.isatty():  # files and pipes keep every letter
            stream.reconfigure(encoding="ascii", errors="replace")
        elif stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace" if "utf" in stream.encoding.lower() else "replace")
