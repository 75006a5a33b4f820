"""Prepares stdout and stderr: their encoding, and the terminal size given by the environment."""

from __future__ import annotations

import io
import os
import sys

from superpod.errors import UserError

TERMINAL_SIZES = {"COLUMNS": range(20, 10_001), "LINES": range(1, 10_001)}
"""Accepted values of the variables for the terminal size. Rich accepts any value, and prints nothing in 0 columns."""


def prepare() -> None:
    """Make stdout and stderr safe to print to. Must run before rich and Typer read the environment.

    Raises:
        UserError: stdout is closed.
    """
    for name, accepted in TERMINAL_SIZES.items():
        value = os.environ.get(name, "")
        if not (value.isascii() and value.isdigit() and len(value) < 9 and int(value) in accepted):
            os.environ.pop(name, None)  # rich then asks the terminal, or assumes 80 columns
    _replace_unencodable_characters()
    if sys.stdout is None:  # print() would do nothing
        raise UserError(
            "standard output is closed, so the output would be lost", "redirect it to a file or to /dev/null"
        )


def _replace_unencodable_characters() -> None:
    """Replace characters that cannot be encoded, instead of raising UnicodeEncodeError.

    In the C locale, print only ASCII to a terminal, without box-drawing characters: Python would assume UTF-8.
    """
    locale = os.environ.get("LC_ALL") or os.environ.get("LANG")
    has_explicit_encoding = os.environ.get("PYTHONIOENCODING") or os.environ.get("PYTHONUTF8") == "1"
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        if locale in ("C", "POSIX") and not has_explicit_encoding and stream.isatty():
            # In UTF-8 mode, which PEP 540 enables in the C locale, Python would print box-drawing characters that
            # such a terminal cannot show.
            stream.reconfigure(encoding="ascii", errors="replace")
        elif stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace" if "utf" in stream.encoding.lower() else "replace")
