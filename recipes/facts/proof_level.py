"""How far each recipe was proven: planned, built, built with TE, rehearsed, or run on a GPU.

Reads what `recipes prove --write` has committed (`proven.json`), and the list of runs on GPUs (`ran_on_gpu.toml`).
Needs no NeMo. A proof counts only while the model's layouts are those that it was made for.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from superpod.recipes.registry import LAYOUTS, Recipe

Level = Literal["planned", "built", "built with TE", "rehearsed", "ran on GPU"]
LEVELS: tuple[Level, ...] = get_args(Level)
EVIDENCE = Path(__file__).with_name("proven.json")
RAN_ON_GPU = Path(__file__).with_name("ran_on_gpu.toml")
TITLES = {"nemo_toolkit": "NeMo", "megatron-core": "Megatron-Core", "transformer_engine": "Transformer Engine"}
"""Of the libraries that a sentence names."""

CONSTRUCTED = ("model.", "trainer.strategy.", "trainer.plugins", "trainer.callbacks", "optim.config", "peft", "with=")
"""Overrides that start so change what was proven; others, such as a number of steps, do not."""
CONSTRUCTED_DATA = ("data.micro_batch_size", "data.seq_length")


@dataclass(frozen=True)
class ProofLevel:
    """How far a recipe was proven at its sizes."""

    level: Level
    why: str = ""
    """why it is no further, where there is a reason to name"""
    broken: Mapping[int, str] = field(default_factory=dict)
    """nodes -> why the recipe would not start at that size"""
    versions: str = ""
    """of the libraries that it was proven with"""

    def sentence(self, nodes: int | None = None) -> str:
        """`built with TE (NeMo 2.7.3, ...)`; of a size that is known not to start, that and why."""
        if nodes is not None and nodes in self.broken:
            return f"known not to start: {self.broken[nodes]}"
        detail = "; ".join(filter(None, [self.versions if self.level != "planned" else "", self.why]))
        return f"{self.level} ({detail})" if detail else self.level

    @property
    def short(self) -> str:
        """For a column: the level, and whether some size is known not to start."""
        return f"{self.level}, {len(self.broken)} sizes broken" if self.broken else self.level


def of(recipe: Recipe) -> ProofLevel:
    """How far `recipe` was proven."""
    if recipe.model.broken:
        return ProofLevel("planned", broken=dict.fromkeys(recipe.nodes, recipe.model.broken))
    if recipe.source.parent != LAYOUTS:
        return ProofLevel("planned", f"of a collection: `recipes prove {recipe.name}` builds it")
    known = _evidence()
    group = known.get("models", {}).get(recipe.model.name)
    if group is None:
        return ProofLevel("planned", known.get("unproven", {}).get(recipe.model.name, ""))
    if group["layouts"] != layouts_hash([recipe.source]):
        return ProofLevel("planned", "its layouts have changed since it was proven")
    versions = ", ".join(f"{title} {known['versions'][name]}" for name, title in TITLES.items())
    level: Level = group["level"]
    if recipe.name in known.get("rehearsed", ()):
        level = "rehearsed"
    if recipe.name in _ran():
        level = "ran on GPU"
    return ProofLevel(level, broken=_broken().get(recipe.name, {}), versions=versions)


def refusal(recipe: Recipe, nodes: int, overrides: Iterable[str]) -> tuple[str, str] | None:
    """Why a run of a recipe that is known not to start is refused, and the way round; None where nothing is known.

    Overrides of what was built make another run of it, of which nothing is known.
    """
    if problem := unusable(recipe):
        return problem
    proven = of(recipe)
    if nodes not in proven.broken or changes_what_was_built(overrides):
        return None
    better = [str(size) for size in recipe.nodes if size not in proven.broken]
    way = f"it starts at {', '.join(better)} nodes; or " if better else ""
    return (
        f"{recipe.name} is known not to start at {nodes} nodes: {proven.broken[nodes]}",
        f"{way}override what is wrong (model.*, trainer.strategy.*, trainer.plugins.*), which is taken as another run",
    )


def unusable(recipe: Recipe) -> tuple[str, str] | None:
    """Why no run of this recipe's model can train, at any size and with any override, and the way round; None else."""
    m = recipe.model
    return (f"{recipe.name} cannot train: {m.broken}", m.way_round) if m.broken else None


def sentence(recipe: Recipe, nodes: int, overrides: Iterable[str] = ()) -> str:
    """How far a run of `recipe` was proven; with overrides of what was built, how far it was without them."""
    proven = of(recipe).sentence(nodes)
    return f"of the recipe without your overrides: {proven}" if changes_what_was_built(overrides) else proven


def changes_what_was_built(overrides: Iterable[str]) -> bool:
    """Whether a run with these overrides is another one than the proof has built."""
    return any(text.startswith((*CONSTRUCTED, *CONSTRUCTED_DATA)) for text in overrides)


def layouts_hash(files: Iterable[Path]) -> str:
    """Hash of layout files: a proof holds for these layouts only."""
    return _hash(tuple(files))


@cache
def _hash(files: tuple[Path, ...]) -> str:
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]


@cache
def _evidence() -> dict[str, Any]:
    return json.loads(EVIDENCE.read_text()) if EVIDENCE.is_file() else {}


@cache
def _broken() -> dict[str, dict[int, str]]:
    """Recipe -> nodes -> why it would not start there. The file has a group for every reason."""
    sizes: dict[str, dict[int, str]] = {}
    for group in _evidence().get("broken", []):
        for name, nodes in group["recipes"].items():
            sizes.setdefault(name, {}).update(dict.fromkeys(nodes, group["why"]))
    return sizes


@cache
def _ran() -> frozenset[str]:
    return frozenset(run["recipe"] for run in tomllib.loads(RAN_ON_GPU.read_text()).get("run", []))
