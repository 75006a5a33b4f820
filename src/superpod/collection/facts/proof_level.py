"""How far each recipe was proven: planned, built, built with TE, rehearsed, or run on a GPU.

Reads what `recipes prove --write` has committed (`proven.json`), and the list of runs on GPUs (`ran_on_gpu.toml`).
Needs no NeMo. A proof is of one size, and counts while its recipe's facts and layout there are those that were built. A
rehearsal or a run on GPUs counts while that size has its layout.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from superpod.collection.registry import LAYOUTS, Recipe
from superpod.errors import UserError
from superpod.planner.layout import Layout

Level = Literal["planned", "built", "built with TE", "rehearsed", "ran on GPU"]
LEVELS: tuple[Level, ...] = get_args(Level)
MEANING = (
    "proof: planned = legal and fits, by the planner; built with TE = its models were built with Transformer Engine's "
    "layers, shapes only; rehearsed = trained on CPUs, shrunk; ran on GPU = took real steps; "
    "recipes prove NAME builds it"
)
EVIDENCE = Path(__file__).with_name("proven.json")
RAN_ON_GPU = Path(__file__).with_name("ran_on_gpu.toml")
TITLES = {"nemo_toolkit": "NeMo", "megatron-core": "Megatron-Core", "transformer_engine": "Transformer Engine"}
"""Of the libraries that a sentence names."""

NOT_RECORDED = "-"
"""For a digest that an earlier proof did not record, which checked neither process groups nor schedules."""
EARLIER = "not its process groups and schedule"
CONSTRUCTED = ("model.", "trainer.strategy.", "trainer.plugins", "trainer.callbacks", "optim.config", "peft", "with=")
"""Overrides that start so change what was proven; others, such as a number of steps, do not."""
CONSTRUCTED_DATA = ("data.micro_batch_size", "data.seq_length")


class SizeDigests(NamedTuple):
    """What a proof records of a size."""

    facts: str
    """of the recipe's own facts at that size, by which the evidence is found"""
    inputs: str
    """of the resolved configuration, and of what the planner expects"""
    built: str
    """of what was built; `NOT_RECORDED` if this proof has not built it"""


@dataclass(frozen=True)
class ProofLevel:
    """How far a recipe was proven at its sizes."""

    level: Level
    """of every size"""
    why: str = ""
    """why it is no further, where there is a reason to name"""
    broken: Mapping[int, str] = field(default_factory=dict)
    """nodes -> why the recipe would not start at that size"""
    versions: str = ""
    """of the libraries that it was proven with"""
    further: Mapping[int, Level] = field(default_factory=dict)
    """nodes -> level of a size that is further than all are: `rehearsed` and `ran on GPU` are of a size"""

    def sentence(self, nodes: int) -> str:
        """`built with TE (NeMo 2.7.3, ...)`; of a size that is known not to start, that and why."""
        if nodes in self.broken:
            return f"known not to start: {self.broken[nodes]}"
        level = f"{self.further[nodes]} at {_count(nodes)}" if nodes in self.further else self.level
        detail = "; ".join(filter(None, [self.versions if self.level != "planned" else "", self.why]))
        return f"{level} ({detail})" if detail else level

    @property
    def short(self) -> str:
        """For a column: `built with TE, rehearsed at 1 node`, and how many sizes are known not to start."""
        further = [f"{level} at {_count(nodes)}" for nodes, level in self.further.items()]
        broken = [f"{len(self.broken)} sizes broken"] if self.broken else []
        return ", ".join([self.level, *further, *broken])


def of(recipe: Recipe) -> ProofLevel:
    """How far `recipe` was proven."""
    if recipe.model.broken:
        return ProofLevel("planned", broken=dict.fromkeys(recipe.nodes, recipe.model.broken))
    if recipe.source.parent != LAYOUTS:
        return ProofLevel("planned", f"of a collection: `recipes prove {recipe.name}` builds it")
    known = _evidence()
    ran: dict[int, Level] = {nodes: "ran on GPU" for nodes in _ran_at(recipe)}
    if why := known.get("unproven", {}).get(recipe.model.name):
        return ProofLevel("planned", why, further=ran)
    built = {nodes: _built().get(facts(recipe, nodes)) for nodes in recipe.nodes}
    broken = _broken().get(recipe.name, {})
    stale = [nodes for nodes in recipe.nodes if built[nodes] is None and nodes not in broken]
    rehearsed = known.get("rehearsed", {}).get(recipe.name, ())
    further: dict[int, Level] = {nodes: "rehearsed" for nodes in rehearsed if nodes not in stale}
    versions = ", ".join(f"{title} {known['versions'][name]}" for name, title in TITLES.items()) if known else ""
    if stale:
        some: dict[int, Level] = {nodes: "built with TE" for nodes in recipe.nodes if built[nodes] is not None}
        sizes = "" if len(stale) == len(recipe.nodes) else f" at {', '.join(map(str, stale))} nodes"
        why = f"stale: new, or changed since it was built{sizes}" if known else ""
        return ProofLevel("planned", why, broken, versions, some | further | ran)
    why = EARLIER if NOT_RECORDED in built.values() else ""
    return ProofLevel("built with TE", why, broken, versions, further | ran)


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


def require_trainable(recipe: Recipe) -> None:
    """Refuse a recipe whose model cannot train with the pinned versions. Raises UserError with the way round."""
    if problem := unusable(recipe):
        raise UserError(*problem)


def sentence(recipe: Recipe, nodes: int, overrides: Iterable[str] = ()) -> str:
    """How far a run of `recipe` was proven; with overrides of what was built, how far it was without them."""
    if nodes not in recipe.nodes:
        sizes, name = ", ".join(map(str, recipe.nodes)), recipe.name
        return (
            f"not proven: {_count(nodes)} is not a declared size ({sizes}); `recipes prove {name} --nodes {nodes}` "
            f"builds it, and `recipes rehearse {name} --nodes {nodes}` trains it, shrunk"
        )
    proven = of(recipe).sentence(nodes)
    return f"of the recipe without your changes: {proven}" if changes_what_was_built(overrides) else proven


def changes_what_was_built(overrides: Iterable[str]) -> bool:
    """Whether a run with these overrides is another one than the proof has built."""
    return any(text.startswith((*CONSTRUCTED, *CONSTRUCTED_DATA)) for text in overrides)


def facts(recipe: Recipe, nodes: int) -> str:
    """Digest of what the configuration of a recipe is made from at one size, as far as the recipe itself has it."""
    own = (recipe.name, recipe.model.name, recipe.task, recipe.gpu, recipe.precision, recipe.seq, recipe.gpus_per_node)
    return hashlib.sha256(repr((*own, nodes, *vars(recipe.layout(nodes)).items())).encode()).hexdigest()[:10]


def read() -> dict[str, Any]:
    """The evidence as it stands in its file; empty where nothing was proven.

    Raises:
        UserError: the file is no JSON, such as one with a merge's marks in it.
    """
    try:
        return json.loads(EVIDENCE.read_text()) if EVIDENCE.is_file() else {}
    except ValueError as broken:
        raise UserError(f"{EVIDENCE} is damaged: {broken}", "take it from git, or remove it and prove anew") from None


@cache
def _evidence() -> dict[str, Any]:
    return read()


@cache
def _built() -> dict[str, str]:
    """Facts of a size -> digest of what was built for it."""
    return {digests.facts: digests.built for digests in recorded(_evidence())}


def recorded(known: Mapping[str, Any]) -> list[SizeDigests]:
    """What the evidence has of every size."""
    return [SizeDigests(*text.split(" ")) for sizes in known.get("sizes", {}).values() for text in sizes.values()]


@cache
def _broken() -> dict[str, dict[int, str]]:
    """Recipe -> nodes -> why it would not start there. The file has a group for every reason."""
    sizes: dict[str, dict[int, str]] = {}
    for group in _evidence().get("broken", []):
        for name, nodes in group["recipes"].items():
            sizes.setdefault(name, {}).update(dict.fromkeys(nodes, group["why"]))
    return sizes


@cache
def _runs() -> list[dict[str, Any]]:
    return tomllib.loads(RAN_ON_GPU.read_text()).get("run", [])


def _ran_at(recipe: Recipe) -> list[int]:
    """The sizes at which it ran on GPUs in the layout that it has there today, and no such run failed."""
    verdicts: dict[int, list[bool]] = {}
    for run in _runs():
        if run["recipe"] == recipe.name and run["nodes"] in recipe.nodes:
            given: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value for key, value in run["layout"].items()
            }
            if Layout(**given) == recipe.layout(run["nodes"]):
                verdicts.setdefault(run["nodes"], []).append(run["passed"])
    return [nodes for nodes, passed in sorted(verdicts.items()) if all(passed)]


def _count(nodes: int) -> str:
    return f"{nodes} node{'s' * (nodes > 1)}"
