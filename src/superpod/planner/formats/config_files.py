"""Read users' configuration files; error messages name the file."""

from __future__ import annotations

import difflib
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from superpod.errors import UserError, cut


def read_toml(path: Path) -> dict[str, Any]:
    """Read the tables of a TOML file. Raises UserError if the file cannot be read, or is not TOML."""
    return parse_toml(read_text(path), str(path))


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parse TOML text; error messages begin with `where`. Raises UserError if the text is not TOML."""
    import tomllib  # takes 10 ms, and only a caller that reads a file needs it

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as broken:  # TOMLDecodeError, and Python's own limits
        raise UserError(
            f"{where} is not TOML: {broken}", "correct the file; https://toml.io describes the syntax"
        ) from broken


def find_line(text: str, keys: list[str]) -> int:
    """Return the line of a key in TOML text, else the line of its table, else 1."""
    lines, tables = _find_lines(text)
    return lines.get(".".join(keys)) or tables.get(".".join(keys[:-1]), 1)


@lru_cache(maxsize=4)
def _find_lines(text: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the first line of each table and key in TOML text, and the last line of each table."""
    lines, tables, table = dict[str, int](), dict[str, int](), ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            table = re.sub(r"""["']""", "", header[1]).strip()
            tables[table] = number
            lines.setdefault(table, number)
        elif match := re.match(r"""\s*["']?([\w.-]+)["']?\s*=""", line):
            lines.setdefault(f"{table}.{match[1]}" if table else match[1], number)
    return lines, tables


MAX_BYTES = 10 * 2**20
"""Maximum size of a configuration file; a larger file is not a configuration."""


def read_text(path: Path, expected: str = "a configuration file") -> str:
    """Return the text of a configuration file; error messages ask the user to pass `expected`.

    Raises:
        UserError: the file does not exist, cannot be read, is not a regular text file, or is too large.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # opening a pipe would block
            hint = "pass a file, not a pipe or device"
            raise UserError(f"{path} cannot be read: it is not a regular file", hint)
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode()
    except (OSError, ValueError) as broken:
        raise unreadable_error(path, broken, expected) from None
    if len(content) > MAX_BYTES:
        raise UserError(
            f"{path} cannot be read: it exceeds {MAX_BYTES // 2**20} MiB, the limit for a configuration",
            f"pass {expected}",
        )
    return text


def read_json(path: Path, expected: str = "a JSON file") -> dict[str, Any]:
    """Return the object in a JSON file; error messages ask the user to pass `expected`.

    Raises:
        UserError: the file cannot be read (see `read_text`), or does not contain a JSON object.
    """
    try:
        value = json.loads(read_text(path, expected))
    except (ValueError, RecursionError) as broken:
        raise UserError(f"{path} is not JSON: {broken}", f"pass {expected}") from broken
    if not isinstance(value, dict):
        raise UserError(f"{path} does not contain a JSON object", f"pass {expected}")
    return value


def unreadable_error(path: Path, error: OSError | ValueError, expected: str) -> UserError:
    """Return the UserError for a file that cannot be opened or decoded; its hint asks the user to pass `expected`."""
    name = str(path) if len(str(path)) < 200 and str(path).isprintable() else cut(str(path))
    if isinstance(error, FileNotFoundError):
        siblings = _sibling_names(path) if len(path.name) < 200 else []
        similar_names = difflib.get_close_matches(path.name, siblings, n=1, cutoff=0.8)
        suggestion = f"; did you mean {similar_names[0]}?" if similar_names else ""
        return UserError(f"{name} does not exist", f"pass {expected}{suggestion}")
    if isinstance(error, IsADirectoryError):
        return UserError(f"{name} is a folder", f"pass {expected}")
    if isinstance(error, UnicodeDecodeError):
        return UserError(f"{name} is not a text file: byte {error.start + 1} is not UTF-8", f"pass {expected}")
    why = getattr(error, "strerror", None) or str(error)
    return UserError(f"{name} cannot be read: {why}", f"pass {expected}")


def _sibling_names(path: Path) -> list[str]:
    """Return up to 1,000 names in the folder of `path`; [] if the folder cannot be read."""
    try:
        return sorted(entry.name for entry in path.parent.iterdir())[:1000]
    except OSError:
        return []
