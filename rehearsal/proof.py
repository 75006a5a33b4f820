"""Proves that recipes can start: plans each declared size, and builds its real models with Transformer Engine's layers.

For each size it makes Megatron's grid of ranks at the real world size, and resolves the configuration as NeMo's
strategy, precision and callbacks write it, whose own checks then run. Sizes that resolve to the same (`resolved.py`)
share one build: the models of the first, a middle and the last pipeline rank. A file keeps the results
(`proof_cache.py`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from superpod.planner import predict
from superpod.planner.planned_job import PlannedJob
from superpod.recipes import planned_job as jobs
from superpod.recipes.registry import Recipe
from superpod.rehearsal import fingerprint, proof_pool, rank_models, resolved, standing
from superpod.rehearsal.parameter_counts import Counter, Planned, tolerance
from superpod.rehearsal.proof_cache import Outcome, ProofCache
from superpod.rehearsal.proof_pool import Note
from superpod.rehearsal.rank_models import SizeKey
from superpod.rehearsal.standing import Size

RESOLVED_AT_ONCE, BUILT_AT_ONCE = 100, 10
"""Sizes that a process works on before it says so: some 5 s."""
Expected = tuple[Planned, float, int]
"""The parameters that a size's ranks must have, the share by which they may differ, and the GPUs of a node."""


@dataclass(frozen=True)
class Failure:
    """A size that would not start, and why."""

    recipe: str
    nodes: int
    why: str


@dataclass
class Proof:
    """Counts and failures of a proof."""

    recipes: int = 0
    sizes: int = 0
    configurations: int = 0
    """Different resolved configurations."""
    models: int = 0
    """Rank models of all sizes: first, middle and last pipeline rank of each."""
    built: int = 0
    """Different ones among them."""
    layers: int = 0
    """Different configurations of Transformer Engine's layers."""
    resolved_now: int = 0
    """Sizes resolved in this call; the others were in the file."""
    built_now: int = 0
    """Rank models built in this call."""
    generations: list[str] = field(default_factory=list)
    """Of GPUs, such as sm90."""
    versions: dict[str, str] = field(default_factory=dict)
    unproven: dict[str, str] = field(default_factory=dict)
    """Model -> why it cannot be built without a GPU."""
    failures: list[Failure] = field(default_factory=list)
    known: list[Failure] = field(default_factory=list)
    """Sizes of models that are known to be broken (`Model.broken`) and fail as they are known to; no failures."""
    digests: dict[Size, str] = field(default_factory=dict)
    """Of the resolved configurations of sizes without a failure."""
    expected: dict[Size, Expected] = field(default_factory=dict)
    """Of the same sizes."""
    standing: set[str] = field(default_factory=set)
    """Models of which nothing was built, since a written proof still holds for them."""

    def stands(self, recipe: Recipe) -> bool:
        """Whether the recipe is of a model in `standing`."""
        return recipe.model.name in self.standing


def prove(
    recipes: Iterable[Recipe],
    *,
    cache_file: Path,
    workers: int = 2,
    note: Note = lambda *_: None,
    written: Mapping[str, Any] | None = None,
) -> Proof:
    """Plan and build every declared size of `recipes`.

    Args:
        recipes: the recipes to prove.
        cache_file: JSON of earlier results; written as they arrive.
        written: a proof whose models are not built anew where it still holds (`standing.py`); None = build all.
        workers: processes that build, each about 1.5 GiB.
        note: called with what is done, how many are, and of how many.

    Raises:
        UserError: NeMo, or Transformer Engine's Python, is not installed.
    """
    versions, recipes = fingerprint.versions(), list(recipes)
    sizes = {(recipe.name, nodes): recipe for recipe in recipes for nodes in recipe.nodes}
    planned = plan((recipe, nodes) for (_, nodes), recipe in sizes.items())
    faults = {(failure.recipe, failure.nodes): failure.why for failure in refused(planned)}
    wanted = {size: SizeKey.of(recipe, size[1]) for size, recipe in sizes.items() if size not in faults}
    cache = ProofCache(cache_file)
    proof = Proof(recipes=len({name for name, _ in sizes}), sizes=len(sizes), versions=versions)
    try:
        with proof_pool.Workers(workers) as pool:
            run = _Run(sizes, wanted, cache, proof, pool, note)
            digests = _resolve(run, faults)
            expected = _expected(digests, sizes, planned)
            proof.standing = standing.models(written, recipes, digests, expected) if written else set()
            outcomes = _build(run, {size: digests[size] for size in digests if not proof.stands(sizes[size])})
    finally:
        cache.save()  # after Ctrl-C too
    _judge(outcomes, sizes, planned, proof, faults)
    _count(proof, digests, outcomes, sizes)
    known = _known({size: sizes[size] for size in wanted}, set(outcomes), proof, faults)
    proof.failures = [Failure(*size, faults[size]) for size in sizes if size in faults]
    proof.known = [Failure(*size, sizes[size].model.broken) for size in sizes if size in known]
    sound = [size for size in digests if size not in faults and size not in known]
    proof.digests = {size: digests[size] for size in sound}
    proof.expected = {size: expected[size] for size in sound}
    return proof


def plan(sizes: Iterable[tuple[Recipe, int]]) -> dict[Size, PlannedJob]:
    """The planned job of every recipe at so many nodes."""
    return {(recipe.name, nodes): jobs.job(recipe, nodes) for recipe, nodes in sizes}


def refused(planned: Mapping[Size, PlannedJob]) -> list[Failure]:
    """Every job that is illegal or too large for its GPU; builds nothing."""
    failures = []
    predictions = predict.many(list(planned.values()))
    for ((name, nodes), job), prediction in zip(planned.items(), predictions, strict=True):
        if prediction.verdict != "ok" or prediction.tight:
            reason = prediction.reason or f"{prediction.short_gib:.1f} GiB over the limit of {job.node.gpu.name}"
            failures.append(Failure(name, nodes, f"{prediction.verdict}: {reason}"))
    return failures


def recipe_key(size: SizeKey, recipe: Recipe) -> str:
    """First level of the file: the facts of a recipe that its configuration is made from, at one size."""
    names = ("name", "task", "gpu", "precision", "seq", "gpus_per_node")
    facts = [recipe.model.name, size.nodes, *(getattr(recipe, name) for name in names), vars(size.layout)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class _Run:
    """A proof at work."""

    sizes: Mapping[Size, Recipe]
    wanted: Mapping[Size, SizeKey]
    """sizes that the planner does not refuse"""
    cache: ProofCache
    proof: Proof
    pool: proof_pool.Workers
    note: Note


def _resolve(run: _Run, faults: dict[Size, str]) -> dict[Size, str]:
    """The digest of every size whose configuration Megatron and NeMo accept; the refusals of others go to `faults`."""
    known = run.cache.resolved
    keys = {size: recipe_key(key, run.sizes[size]) for size, key in run.wanted.items()}
    missing = {keys[size]: key for size, key in run.wanted.items() if keys[size] not in known}
    run.proof.resolved_now = len(missing)
    for results in run.pool.run(rank_models.resolve_all, missing, RESOLVED_AT_ONCE):
        known.update(results)
        run.cache.save_now_and_then()
        run.note("resolving", sum(key in known for key in missing), len(missing))
    digests: dict[Size, str] = {}
    for size, key in keys.items():
        resolution = known[key]
        if digest := resolution.get("digest"):
            digests[size] = digest
        elif missed := resolution.get("missing"):
            run.proof.unproven[run.sizes[size].model.name] = missed
        else:
            faults[size] = resolution.get("error", "")
    return digests


def _build(run: _Run, digests: Mapping[Size, str]) -> dict[Size, Outcome]:
    """The outcome of every digest, for every size that has it.

    A digest leaves out the number of GPUs. Where a constructor has measured it all the same (`Outcome.world`), the
    digest is built at every world of its sizes.
    """
    built = run.cache.built
    worlds = {size: size[1] * run.sizes[size].gpus_per_node for size in digests}
    smallest: dict[str, SizeKey] = {}
    for size in sorted(digests, key=lambda size: (worlds[size], size)):
        smallest.setdefault(digests[size], run.wanted[size])
    _build_missing(run, smallest)
    by_world = {digest for digest in smallest if built[digest].get("world")}
    measured = {size: f"{digest} {worlds[size]}" for size, digest in digests.items() if digest in by_world}
    _build_missing(run, {key: run.wanted[size] for size, key in measured.items()})
    return {size: built[measured.get(size, digest)] for size, digest in digests.items()}


def _build_missing(run: _Run, wanted: Mapping[str, SizeKey]) -> None:
    built = run.cache.built
    missing = {key: size for key, size in wanted.items() if key not in built}
    run.proof.built_now += sum(len(resolved.stages(size.layout)) for size in missing.values())
    for results in run.pool.run(rank_models.build_all, missing, BUILT_AT_ONCE):
        built.update(results)
        run.cache.save_now_and_then()
        run.note("building", sum(key in built for key in missing), len(missing))


def _expected(
    digests: Iterable[Size], sizes: Mapping[Size, Recipe], planned: Mapping[Size, PlannedJob]
) -> dict[Size, Expected]:
    counter = Counter()
    expected: dict[Size, Expected] = {}
    for size in digests:
        recipe, job = sizes[size], planned[size]
        expected[size] = counter.counted(recipe, job), tolerance(job.model), recipe.gpus_per_node
    return expected


def _judge(
    outcomes: Mapping[Size, Outcome],
    sizes: Mapping[Size, Recipe],
    planned: Mapping[Size, PlannedJob],
    proof: Proof,
    faults: dict[Size, str],
) -> None:
    """Enter what was refused, could not be built, or has other parameters than the planner counts."""
    counter = Counter()
    for size, outcome in outcomes.items():
        if missed := outcome.get("missing"):
            proof.unproven[sizes[size].model.name] = missed
        elif fault := outcome.get("error") or counter.difference(
            sizes[size], planned[size], outcome.get("parameters", [])
        ):
            faults[size] = fault


def _known(tried: Mapping[Size, Recipe], built: set[Size], proof: Proof, faults: dict[Size, str]) -> set[Size]:
    """The sizes of models known to be broken that fail as known, which are no faults; one that does not is a fault."""
    known: set[Size] = set()
    for size, recipe in tried.items():
        reason = recipe.model.broken
        if not reason or recipe.model.name in proof.unproven:
            continue
        if size not in faults and size in built:
            faults[size] = f"it builds now, so that it must no longer be called broken in recipes/models: {reason}"
        elif _identifiers(faults.get(size, "")) & _identifiers(reason):
            known.add(size)
            del faults[size]
    return known


def _identifiers(text: str) -> set[str]:
    """Names such as rotary_pos_cos_sin, by which an error is told from another."""
    return set(re.findall(r"[A-Za-z]+_\w+", text))


def _count(
    proof: Proof, digests: Mapping[Size, str], outcomes: Mapping[Size, Outcome], sizes: Mapping[Size, Recipe]
) -> None:
    ranks = {size: len(resolved.stages(sizes[size].layout(size[1]))) for size in digests}
    proof.configurations = len(set(digests.values()))
    proof.models = sum(ranks.values())
    proof.built = sum({digest: ranks[size] for size, digest in digests.items()}.values())
    proof.layers = len(set[str]().union(*(outcome.get("layers", []) for outcome in outcomes.values())))
    proof.generations = sorted({resolved.generation(sizes[size]) for size in digests})
