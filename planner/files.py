"""Reads configuration files that users write, and names the file where it cannot."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from superpod.errors import UserError


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        UserError: when it cannot be read.
    """
    return parse_toml(text_of(path), str(path))


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The tables of TOML text; `where` opens the message.

    Raises:
        UserError: when it is not TOML.
    """
    import tomllib  # takes 10 ms, and only a caller that reads a file needs it

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as broken:  # TOMLDecodeError, and Python's own limits
        raise UserError(
            f"{where} is not TOML: {broken}", "correct it there; https://toml.io shows the form"
        ) from broken


def line_of(text: str, keys: list[str]) -> int:
    """Line of a key in TOML text; of its table where the key is not there, and 1 where neither is."""
    table, best = "", 1
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            table = re.sub(r"""["']""", "", header[1]).strip()
            if table == ".".join(keys):
                return number
            if table == ".".join(keys[:-1]):
                best = number
        elif match := re.match(r"""\s*["']?([\w.-]+)["']?\s*=""", line):
            path = f"{table}.{match[1]}" if table else match[1]
            if path == ".".join(keys):
                return number
    return best


LARGEST = 10 * 2**20
"""Bytes of a configuration file; a larger one is another kind of file."""


def text_of(path: Path) -> str:
    """The text of a configuration file.

    Raises:
        UserError: when it cannot be read, is no text, or is too large to be one.
    """
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as broken:
        raise UserError(f"{path} cannot be read: {broken}") from broken
    if len(content) > LARGEST:
        raise UserError(f"{path} cannot be read: it has more than {LARGEST // 2**20} MiB, and is no configuration")
    return text
