"""The few numbers of the memory model that are not arithmetic. They and their sources stand in `data/memory.toml`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from superpod.planner.formats.files import read_toml

FILE = Path(__file__).parent.parent / "data" / "memory.toml"
MIB = 2**20


def constant(table: str, key: str) -> float:
    """One number of the file."""
    return float(_tables()[table][key])


@cache
def _tables() -> dict[str, Any]:
    return read_toml(FILE)
