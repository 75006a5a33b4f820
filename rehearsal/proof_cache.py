"""Remembers a proof's results in one file, on two levels.

The first level has the digest of a size's resolved configuration under the recipe's facts, so that nothing is resolved
anew while the code that resolves is the same. The second has the result of a build under that digest.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, TypedDict

from superpod.rehearsal import fingerprint

EVERY_S = 10
"""Seconds between two writes of the file while results arrive."""
KEPT = 3
"""Generations of code whose results stay in the file: going back to the last branch costs nothing."""


class Resolution(TypedDict, total=False):
    """What a size of a recipe resolves to."""

    digest: str
    error: str
    """with which Megatron or NeMo refuses the configuration"""


class Outcome(TypedDict, total=False):
    """Result of building the models of a resolved configuration."""

    parameters: list[list[int]]
    """Of each pipeline rank that was built, the parameters of each of its chunks."""
    layers: list[str]
    """Digests of the distinct TE layers."""
    world: list[str]
    """Process groups that the constructors measured and whose size follows from the number of GPUs."""
    error: str
    missing: str
    """what the model needs that only a machine with a GPU has"""


class ProofCache:
    """The file, read whole; `save` writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._levels = _read(path)
        self._saved = time.monotonic()
        self.resolved: dict[str, Resolution] = self._current("resolved", fingerprint.of_resolving())
        self.built: dict[str, Outcome] = self._current("built", fingerprint.of_building())

    def _current(self, level: str, code: str) -> dict[str, Any]:
        """The results of this code, moved to the end, and only the last few before them."""
        known = self._levels.setdefault(level, {})
        mine = known.pop(code, {})
        self._levels[level] = dict(list(known.items())[-KEPT + 1 :]) | {code: mine}
        return mine

    def save_now_and_then(self) -> None:
        """`save`, unless it was done in the last seconds: the file has megabytes."""
        if time.monotonic() - self._saved > EVERY_S:
            self.save()

    def save(self) -> None:
        """Write the file whole, or leave it as it was.

        Raises:
            OSError: no space, or no permission.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            partial.write_text(json.dumps(self._levels, separators=(",", ":")))
            os.replace(partial, self._path)
        finally:
            partial.unlink(missing_ok=True)
        self._saved = time.monotonic()


def _read(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The file's levels; nothing of one that cannot be read, or that another version of this project wrote."""
    try:
        levels = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    whole = isinstance(levels, dict) and set(levels) == {"resolved", "built"}
    return levels if whole and all(isinstance(level, dict) for level in levels.values()) else {}
