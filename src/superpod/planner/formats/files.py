"""Reads configuration files that users write, and names the file where it cannot."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

from superpod.errors import UserError, cut


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        UserError: when it cannot be read.
    """
    return parse_toml(read_text(path), str(path))


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


def find_line(text: str, keys: list[str]) -> int:
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


def read_text(path: Path, wanted: str = "a configuration file") -> str:
    """The text of a configuration file; `wanted` says in a message what to give instead.

    Raises:
        UserError: when it does not exist or cannot be read, is no regular file or no text, or is too large to be one.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # a pipe's reader would wait for a writer
            hint = "give the file itself, not a pipe or device"
            raise UserError(f"{path} cannot be read: it is no regular file", hint)
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        text = content.decode()
    except (OSError, ValueError) as broken:
        raise unreadable(path, broken, wanted) from None
    if len(content) > LARGEST:
        raise UserError(
            f"{path} cannot be read: it has more than {LARGEST // 2**20} MiB, and is no configuration",
            f"give {wanted}",
        )
    return text


def read_json(path: Path, wanted: str = "a JSON file") -> dict[str, Any]:
    """The object in a JSON file; `wanted` as in `read_text`.

    Raises:
        UserError: as `read_text`, or it is not JSON, or no object.
    """
    try:
        value = json.loads(read_text(path, wanted))
    except (ValueError, RecursionError) as broken:
        raise UserError(f"{path} is not JSON: {broken}", f"give {wanted}") from broken
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object", f"give {wanted}")
    return value


def unreadable(path: Path, broken: OSError | ValueError, wanted: str) -> UserError:
    """What opening or decoding a user's file failed with, in words, and what to give instead."""
    name = str(path) if len(str(path)) < 200 and str(path).isprintable() else cut(str(path))
    if isinstance(broken, FileNotFoundError):
        near = difflib.get_close_matches(path.name, _beside(path), n=1, cutoff=0.8) if len(path.name) < 200 else []
        return UserError(f"{name} does not exist", f"give {wanted}" + (f"; did you mean {near[0]}?" if near else ""))
    if isinstance(broken, IsADirectoryError):
        return UserError(f"{name} is a folder", f"give {wanted}")
    if isinstance(broken, UnicodeDecodeError):
        return UserError(f"{name} is no text: byte {broken.start + 1} is not UTF-8", f"give {wanted}")
    why = getattr(broken, "strerror", None) or str(broken)
    return UserError(f"{name} cannot be read: {why}", f"give {wanted}")


def _beside(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.parent.iterdir())[:1000]
    except OSError:
        return []
