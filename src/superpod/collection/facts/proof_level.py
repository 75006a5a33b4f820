"""Determine the proof level of each recipe: planned, built, built with TE, rehearsed, tested or run on GPUs.

Reads the results of `recipes prove --write` (`proven.json`) and `recipes prove --on-gpu DIR --write`
(`tested_on_gpu.json`), and the list of runs on GPUs (`ran_on_gpu.toml`). Does not need NeMo. A proof applies to one
size. A build or a test on one GPU is stale if the facts of the recipe have changed since then; a rehearsal or a run on
GPUs, if the layout has.
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
from superpod.errors import UserError, counted
from superpod.planner.layout import Layout

Level = Literal["planned", "built", "built with TE", "rehearsed", "tested on one GPU", "ran on GPU"]
LEVELS: tuple[Level, ...] = get_args(Level)
MEANING: Mapping[Level, str] = {
    "planned": "legal and fits in memory according to the planner",
    "built": "the model was built on the meta device",
    "built with TE": "the model was built with Transformer Engine's layers on the meta device",
    "rehearsed": "a smaller model was trained on CPUs",
    "tested on one GPU": "a few layers, in the shapes of one rank, took three steps on a GPU",
    "ran on GPU": "trained on GPUs",
}
PROOF_FILE = Path(__file__).with_name("proven.json")
TESTED_ON_GPU = Path(__file__).with_name("tested_on_gpu.json")
"""{"tests": [{"gpu": name, "versions": {package: version}, "sizes": {recipe: {nodes: digest from `facts`}}}]}"""
RAN_ON_GPU = Path(__file__).with_name("ran_on_gpu.toml")
TITLES = {"nemo_toolkit": "NeMo", "megatron-core": "Megatron-Core", "transformer_engine": "Transformer Engine"}
"""Package -> displayed name, for the libraries whose versions are shown."""

NOT_RECORDED = "-"
"""Stands for the digest in older proofs, which did not check process groups and schedules."""
GROUPS_NOT_CHECKED = "process groups and schedule not checked"
BUILD_PREFIXES = (
    *("model.", "trainer.strategy.", "trainer.plugins", "trainer.callbacks", "optim.config", "peft", "with="),
    *("data.micro_batch_size", "data.seq_length"),
)
"""Prefixes of overrides that invalidate a proof; all others, such as the number of steps, do not affect it."""


class SizeDigests(NamedTuple):
    """Digests that a proof records for a number of nodes."""

    facts: str
    """Digest of the recipe's facts on that number of nodes, which is the key of the proof."""
    inputs: str
    """Digest of the resolved configuration and the planner's predictions."""
    built: str
    """Digest of the built model, or `NOT_RECORDED`."""


@dataclass(frozen=True)
class ProofLevel:
    """Proof level of a recipe and of its sizes."""

    level: Level
    """Level that all sizes have reached."""
    why: str = ""
    """Why the level is not higher, or ""."""
    broken: Mapping[int, str] = field(default_factory=dict)
    """Number of nodes -> why the recipe would not start there."""
    versions: str = ""
    """Versions of the libraries with which the recipe was built."""
    higher_levels: Mapping[int, Level] = field(default_factory=dict)
    """Number of nodes -> level, for sizes that have reached a higher level than `level`."""

    def sentence(self, nodes: int) -> str:
        """Describe the level on `nodes` nodes: `built with TE (NeMo 2.7.3, ...)`, or why it does not start there."""
        if nodes in self.broken:
            return f"known not to start: {self.broken[nodes]}"
        level = (
            f"{self.higher_levels[nodes]} at {counted(nodes, 'node')}" if nodes in self.higher_levels else self.level
        )
        versions = self.versions if self.level != "planned" else ""
        detail = "; ".join(filter(None, [versions, self.why]))
        return f"{level} ({detail})" if detail else level

    @property
    def summary(self) -> str:
        """Text for a table: `built with TE, rehearsed at 1 node`, and the number of sizes that do not start."""
        texts = [self.level]
        for level in LEVELS:
            sizes = sorted(nodes for nodes, reached in self.higher_levels.items() if reached == level)
            if not sizes:
                continue
            unit = "node" if sizes == [1] else "nodes"
            texts.append(f"{level} at {', '.join(map(str, sizes))} {unit}")
        if self.broken:
            texts.append(f"{len(self.broken)} sizes broken")
        return ", ".join(texts)


def lookup(recipe: Recipe) -> ProofLevel:
    """Look up the proof level of a recipe."""
    if recipe.model.broken:
        return ProofLevel("planned", broken=dict.fromkeys(recipe.nodes, recipe.model.broken))
    if recipe.source.parent != LAYOUTS:
        return ProofLevel("planned", f"user collection; to build it: `recipes prove {recipe.name}`")
    known, tests = _proofs(), _tested_sizes()
    digests = {nodes: facts(recipe, nodes) for nodes in recipe.nodes}
    built_digests = {nodes: _built_digests().get(digest) for nodes, digest in digests.items()}
    broken_sizes = _broken_reasons().get(recipe.name, {})
    stale = [nodes for nodes in recipe.nodes if built_digests[nodes] is None and nodes not in broken_sizes]
    rehearsed = known.get("rehearsed", {}).get(recipe.name, ())
    on_gpu: dict[int, Level] = {
        nodes: "tested on one GPU" for nodes, digest in digests.items() if (recipe.name, nodes, digest) in tests
    }
    on_gpu |= {nodes: "ran on GPU" for nodes in _ran_at(recipe)}
    further: dict[int, Level] = {nodes: "rehearsed" for nodes in rehearsed if nodes not in stale}
    further |= on_gpu
    why = known.get("unproven", {}).get(recipe.model.name)
    if why:
        return ProofLevel("planned", why, higher_levels=on_gpu)
    versions = ", ".join(f"{title} {known['versions'][name]}" for name, title in TITLES.items()) if known else ""
    if stale:
        some: dict[int, Level] = {nodes: "built with TE" for nodes in recipe.nodes if built_digests[nodes] is not None}
        sizes = "" if len(stale) == len(recipe.nodes) else f" at {', '.join(map(str, stale))} nodes"
        why = f"stale: new, or changed since it was built{sizes}" if known else ""
        return ProofLevel("planned", why, broken_sizes, versions, some | further)
    why = GROUPS_NOT_CHECKED if NOT_RECORDED in built_digests.values() else ""
    return ProofLevel("built with TE", why, broken_sizes, versions, further)


def describe_levels(proofs: Iterable[ProofLevel]) -> str:
    """Explain the levels that the recipes have reached, in a line for a table."""
    reached = {level for proof in proofs for level in (proof.level, *proof.higher_levels.values())}
    meanings = "; ".join(f"{level} = {MEANING[level]}" for level in LEVELS if level in reached)
    return f"proof: {meanings}; to build a recipe: `recipes prove NAME`"


def refusal(recipe: Recipe, nodes: int, overrides: Iterable[str]) -> tuple[str, str] | None:
    """Return the message and the hint if a run is known not to start, else None.

    A proof does not apply to runs whose overrides change the model that was built.
    """
    problem = training_problem(recipe)
    if problem:
        return problem
    level = lookup(recipe)
    if nodes not in level.broken or changes_what_was_built(overrides):
        return None
    working = [str(size) for size in recipe.nodes if size not in level.broken]
    hint = "override the cause (model.*, trainer.strategy.*, trainer.plugins.*); this result does not apply then"
    if working:
        hint = f"use {' or '.join(working)} nodes, or {hint}"
    return f"{recipe.name} is known not to start on {counted(nodes, 'node')}: {level.broken[nodes]}", hint


def training_problem(recipe: Recipe) -> tuple[str, str] | None:
    """Return the error and the workaround if the recipe's model cannot train on any number of nodes, else None."""
    m = recipe.model
    return (f"{recipe.name} cannot train: {m.broken}", m.workaround) if m.broken else None


def require_trainable(recipe: Recipe) -> None:
    """Refuse a recipe whose model cannot train with the pinned versions. Raises UserError with the workaround."""
    problem = training_problem(recipe)
    if problem:
        raise UserError(*problem)


def sentence(recipe: Recipe, nodes: int, overrides: Iterable[str] = ()) -> str:
    """Return a sentence on the proof level of a run of `recipe`."""
    if nodes not in recipe.nodes:
        sizes, name = ", ".join(map(str, recipe.nodes)), recipe.name
        return (
            f"not proven (its model was not built): {counted(nodes, 'node')} is not a declared size ({sizes}); to "
            f"build it: `recipes prove {name} --nodes {nodes}`; to train a smaller model: "
            f"`recipes rehearse {name} --nodes {nodes}`"
        )
    level_text = lookup(recipe).sentence(nodes)
    return f"{level_text}, without your changes" if changes_what_was_built(overrides) else level_text


def changes_what_was_built(overrides: Iterable[str]) -> bool:
    """Return whether the overrides change a configuration so that its proof does not apply."""
    return any(text.startswith(BUILD_PREFIXES) for text in overrides)


def facts(recipe: Recipe, nodes: int) -> str:
    """Return a digest of the facts from which the recipe's configuration is built at one size."""
    recipe_facts = (
        recipe.name,
        recipe.model.name,
        recipe.task,
        recipe.gpu,
        recipe.precision,
        recipe.seq,
        recipe.gpus_per_node,
    )
    return hashlib.sha256(repr((*recipe_facts, nodes, *vars(recipe.layout(nodes)).items())).encode()).hexdigest()[:10]


def read() -> dict[str, Any]:
    """Read the proof file; {} if there is none.

    Raises:
        UserError: the file is not JSON, for example because of merge conflict markers.
    """
    return _read_json(PROOF_FILE, "recipes prove --write")


def _read_json(path: Path, command: str) -> dict[str, Any]:
    """Read a JSON file; {} if there is none. The hint for a corrupt file names `command`, which writes it."""
    try:
        return json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise UserError(
            f"{path} is corrupt: {error}", f"restore it from git, or delete it and run `{command}`"
        ) from None


@cache
def _proofs() -> dict[str, Any]:
    return read()


@cache
def _built_digests() -> dict[str, str]:
    """Return digest of a size's facts -> digest of the built model."""
    return {digests.facts: digests.built for digests in size_digests(_proofs())}


def size_digests(saved_proof: Mapping[str, Any]) -> list[SizeDigests]:
    """List the digests of all sizes in the contents of a proof file."""
    return [SizeDigests(*text.split(" ")) for sizes in saved_proof.get("sizes", {}).values() for text in sizes.values()]


def read_tested(path: Path) -> list[dict[str, Any]]:
    """Read the tests on GPUs, a group per GPU and set of versions; [] if there is no file. Raises as `read` does."""
    return _read_json(path, "recipes prove --on-gpu DIR --write").get("tests", [])


@cache
def _tested_sizes() -> set[tuple[str, int, str]]:
    """Return (recipe, number of nodes, digest of its facts) of every size that was tested on a GPU."""
    return {
        (name, int(nodes), digest)
        for group in read_tested(TESTED_ON_GPU)
        for name, sizes in group["sizes"].items()
        for nodes, digest in sizes.items()
    }


@cache
def _broken_reasons() -> dict[str, dict[int, str]]:
    """Return recipe -> number of nodes -> why it would not start. The file groups them by reason."""
    sizes: dict[str, dict[int, str]] = {}
    for group in _proofs().get("broken", []):
        for name, nodes in group["recipes"].items():
            sizes.setdefault(name, {}).update(dict.fromkeys(nodes, group["why"]))
    return sizes


@cache
def _runs() -> list[dict[str, Any]]:
    return tomllib.loads(RAN_ON_GPU.read_text()).get("run", [])


def _ran_at(recipe: Recipe) -> list[int]:
    """List the sizes at which the recipe passed all runs on GPUs in its current layout."""
    results: dict[int, list[bool]] = {}
    for run in _runs():
        if run["recipe"] == recipe.name and run["nodes"] in recipe.nodes:
            fields: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value for key, value in run["layout"].items()
            }
            if Layout(**fields) == recipe.layout(run["nodes"]):
                results.setdefault(run["nodes"], []).append(run["passed"])
    return [nodes for nodes, passed in sorted(results.items()) if all(passed)]
