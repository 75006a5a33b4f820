"""Read the measured constants of the memory model from `data/memory.toml`, which lists their sources."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from superpod.planner.formats.config_files import read_toml

FILE = Path(__file__).parent.parent / "data" / "memory.toml"
MIB = 2**20


def constant(table: str, key: str) -> float:
    """Return the constant `[table] key` of `data/memory.toml`."""
    return float(_tables()[table][key])


@cache
def _tables() -> dict[str, Any]:
    """Return the tables of `data/memory.toml`."""
    return read_toml(FILE)
