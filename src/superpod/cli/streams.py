"""Prepares stdout and stderr: sets their encoding, and removes invalid terminal sizes from the environment."""

from __future__ import annotations

import io
import os
import sys

from superpod.errors import UserError

TERMINAL_SIZES = {"COLUMNS": range(20, 10_001), "LINES": range(1, 10_001)}
"""Valid values of the environment variables for the terminal size. With COLUMNS=0, rich would print nothing."""


def prepare() -> None:
    """Set the encoding of stdout and stderr, and remove invalid values of COLUMNS and LINES from the environment.

    Must be called before rich and Typer read the environment.

    Raises:
        UserError: stdout is closed.
    """
    for name, accepted in TERMINAL_SIZES.items():
        value = os.environ.get(name, "")
        if not (value.isascii() and value.isdigit() and len(value) < 9 and int(value) in accepted):
            os.environ.pop(name, None)  # rich then queries the terminal, or assumes 80 columns
    _replace_unencodable_characters()
    if sys.stdout is None:  # print() would do nothing
        raise UserError("stdout is closed, so the output would be lost", "redirect it, for example to /dev/null")


def _replace_unencodable_characters() -> None:
    """Make stdout and stderr replace characters that they cannot encode, instead of raising UnicodeEncodeError.

    In the C locale, output to a terminal is limited to ASCII.
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
