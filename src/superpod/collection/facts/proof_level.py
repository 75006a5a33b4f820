"""Determine the proof level of each recipe: planned, built, built with TE, rehearsed, tested or run on GPUs.

It reads the results of `recipes prove --write` (`proven.json`) and `recipes prove --on-gpu DIR --write`
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
"""Digest in older proofs, which did not check process groups and schedules."""
GROUPS_NOT_CHECKED = "process groups and schedule not checked"
BUILD_PREFIXES = (
    *("model.", "trainer.strategy.", "trainer.plugins", "trainer.callbacks", "optim.config", "peft", "with="),
    *("data.micro_batch_size", "data.seq_length"),
)
"""Prefixes of overrides that invalidate a proof. Others, such as the number of steps, do not."""


class SizeDigests(NamedTuple):
    """Digests that a proof records for a number of nodes."""

    facts: str
    """Digest from `facts`, the key of the proof."""
    inputs: str
    """Digest of the resolved configuration and the planner's predictions."""
    built: str
    """Digest of the built model, or `NOT_RECORDED`."""


@dataclass(frozen=True)
class ProofLevel:
    """Proof level of a recipe, and of sizes with another level."""

    level: Level
    """Level that all sizes have reached."""
    why: str = ""
    """Reason why the level is not higher, or ""."""
    broken: Mapping[int, str] = field(default_factory=dict)
    """Number of nodes -> reason why the recipe does not start there."""
    versions: str = ""
    """Versions of the libraries with which the recipe was built."""
    higher_levels: Mapping[int, Level] = field(default_factory=dict)
    """Number of nodes -> level, for sizes with a higher level than `level`."""

    def sentence(self, nodes: int) -> str:
        """Return a text on the level on `nodes` nodes, such as `built with TE (NeMo 2.7.3, ...)`."""
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
        """Text for a table, such as `built with TE, rehearsed at 1 node, 2 sizes broken`."""
        texts = [self.level]
        for level in LEVELS:
            sizes = sorted(nodes for nodes, reached in self.higher_levels.items() if reached == level)
            if not sizes:
                continue
            unit = "node" if sizes == [1] else "nodes"
            texts.append(f"{level} at {', '.join(map(str, sizes))} {unit}")
        if self.broken:
            texts.append(f"{counted(len(self.broken), 'size')} broken")
        return ", ".join(texts)


def lookup(recipe: Recipe) -> ProofLevel:
    """Return the proof level of a recipe."""
    if recipe.model.broken:
        return ProofLevel("planned", broken=dict.fromkeys(recipe.nodes, recipe.model.broken))
    if recipe.source.parent != LAYOUTS:
        return ProofLevel("planned", f"user collection; to build it: `recipes prove {recipe.name}`")
    known, tests = _read_proofs(), _read_tested_sizes()
    digests = {nodes: facts(recipe, nodes) for nodes in recipe.nodes}
    built_digests = {nodes: _read_built_digests().get(digest) for nodes, digest in digests.items()}
    broken_sizes = _read_broken_sizes().get(recipe.name, {})
    stale = [nodes for nodes in recipe.nodes if built_digests[nodes] is None and nodes not in broken_sizes]
    rehearsed = known.get("rehearsed", {}).get(recipe.name, ())
    on_gpu: dict[int, Level] = {
        nodes: "tested on one GPU" for nodes, digest in digests.items() if (recipe.name, nodes, digest) in tests
    }
    on_gpu |= {nodes: "ran on GPU" for nodes in _list_sizes_run_on_gpu(recipe)}
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
    """Return a line below a table that explains the levels of its recipes."""
    reached = {level for proof in proofs for level in (proof.level, *proof.higher_levels.values())}
    meanings = "; ".join(f"{level} = {MEANING[level]}" for level in LEVELS if level in reached)
    return f"proof: {meanings}; to build a recipe: `recipes prove NAME`"


def explain_refusal(recipe: Recipe, nodes: int, overrides: Iterable[str]) -> tuple[str, str] | None:
    """Return (message, hint) if a run is known not to start, else None.

    A proof does not apply to runs whose overrides change the built model.
    """
    problem = training_problem(recipe)
    if problem:
        return problem
    level = lookup(recipe)
    if nodes not in level.broken or changes_what_was_built(overrides):
        return None
    working = [str(size) for size in recipe.nodes if size not in level.broken]
    hint = "override the cause (model.*, trainer.strategy.* or trainer.plugins.*), so that this result does not apply"
    if working:
        hint = f"use {' or '.join(working)} nodes, or {hint}"
    return f"{recipe.name} is known not to start on {counted(nodes, 'node')}: {level.broken[nodes]}", hint


def training_problem(recipe: Recipe) -> tuple[str, str] | None:
    """Return (message, workaround) if the model of a recipe cannot train with the pinned versions, else None."""
    m = recipe.model
    return (f"{recipe.name} cannot train: {m.broken}", m.workaround) if m.broken else None


def require_trainable(recipe: Recipe) -> None:
    """Raise UserError, with a workaround, if the model of a recipe cannot train with the pinned versions."""
    problem = training_problem(recipe)
    if problem:
        raise UserError(*problem)


def sentence(recipe: Recipe, nodes: int, overrides: Iterable[str] = ()) -> str:
    """Return a text on the proof level of a recipe on `nodes` nodes, with overrides."""
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
    """Return whether overrides change the built model, so that its proof does not apply."""
    return any(text.startswith(BUILD_PREFIXES) for text in overrides)


def facts(recipe: Recipe, nodes: int) -> str:
    """Return a digest of the facts from which the configuration of a recipe on `nodes` nodes is built."""
    names = ("task", "gpu", "precision", "seq", "gpus_per_node")
    recipe_facts = (recipe.name, recipe.model.name, *(getattr(recipe, name) for name in names))
    return hashlib.sha256(repr((*recipe_facts, nodes, *vars(recipe.layout(nodes)).items())).encode()).hexdigest()[:10]


def read() -> dict[str, Any]:
    """Return the content of the proof file; {} if there is none. Raises UserError if it is not JSON."""
    return _read_json(PROOF_FILE, "recipes prove --write")


def _read_json(path: Path, command: str) -> dict[str, Any]:
    """Return the content of a JSON file; {} if there is none. The error for a corrupt file names its `command`."""
    try:
        return json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise UserError(
            f"{path} is corrupt: {error}", f"restore it from git, or delete it and run `{command}`"
        ) from None


@cache
def _read_proofs() -> dict[str, Any]:
    return read()


@cache
def _read_built_digests() -> dict[str, str]:
    """Return the digests of built models by the digest of the facts of their size."""
    return {digests.facts: digests.built for digests in list_digests(_read_proofs())}


def list_digests(saved_proof: Mapping[str, Any]) -> list[SizeDigests]:
    """Return the digests of all sizes in the content of a proof file."""
    return [SizeDigests(*text.split(" ")) for sizes in saved_proof.get("sizes", {}).values() for text in sizes.values()]


def read_tested(path: Path) -> list[dict[str, Any]]:
    """Return the tests on GPUs, grouped by GPU and versions; [] if there is no file. Raises UserError like `read`."""
    return _read_json(path, "recipes prove --on-gpu DIR --write").get("tests", [])


@cache
def _read_tested_sizes() -> set[tuple[str, int, str]]:
    """Return (recipe, number of nodes, digest from `facts`) of all sizes tested on a GPU."""
    return {
        (name, int(nodes), digest)
        for group in read_tested(TESTED_ON_GPU)
        for name, sizes in group["sizes"].items()
        for nodes, digest in sizes.items()
    }


@cache
def _read_broken_sizes() -> dict[str, dict[int, str]]:
    """Return, by recipe and number of nodes, the reasons why sizes do not start."""
    sizes: dict[str, dict[int, str]] = {}
    for group in _read_proofs().get("broken", []):
        for name, nodes in group["recipes"].items():
            sizes.setdefault(name, {}).update(dict.fromkeys(nodes, group["why"]))
    return sizes


@cache
def _read_gpu_runs() -> list[dict[str, Any]]:
    return tomllib.loads(RAN_ON_GPU.read_text()).get("run", [])


def _list_sizes_run_on_gpu(recipe: Recipe) -> list[int]:
    """Return the numbers of nodes on which the recipe passed all runs on GPUs in its current layout."""
    results: dict[int, list[bool]] = {}
    for run in _read_gpu_runs():
        if run["recipe"] == recipe.name and run["nodes"] in recipe.nodes:
            fields: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value for key, value in run["layout"].items()
            }
            if Layout(**fields) == recipe.layout(run["nodes"]):
                results.setdefault(run["nodes"], []).append(run["passed"])
    return [nodes for nodes, passed in sorted(results.items()) if all(passed)]
