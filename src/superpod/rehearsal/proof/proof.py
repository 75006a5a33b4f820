"""Proves that recipes can start: plans each declared size and builds its models with Transformer Engine's layers.

For each size it creates Megatron's grid of ranks at the real world size, and resolves the configuration with NeMo's
strategy, precision plugin and callbacks, including their checks. Sizes that resolve to the same configuration
(`resolved.py`) share one build: the models of the first, a middle and the last pipeline rank. `proof_store.py` stores
the results.
"""

from __future__ import annotations

import re
from collections import Counter as Counted
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from superpod.collection import recipe_job as jobs
from superpod.collection.facts import proof_level
from superpod.collection.facts.proof_level import SizeDigests
from superpod.collection.registry import ADAPTERS, Recipe
from superpod.planner import predict
from superpod.planner.planned_job import PlannedJob
from superpod.rehearsal.proof import proof_pool, proof_store, rank_models, resolved
from superpod.rehearsal.proof.parameter_counts import Counter, tolerance
from superpod.rehearsal.proof.proof_pool import Note
from superpod.rehearsal.proof.proof_store import Outcome, ProofCache, Size
from superpod.rehearsal.proof.rank_models import SizeKey

RESOLVED_AT_ONCE, BUILT_AT_ONCE = 100, 10
"""Number of sizes per batch of a worker process, which takes about 5 s."""


@dataclass(frozen=True)
class Failure:
    """A recipe that cannot start on a number of nodes."""

    recipe: str
    nodes: int
    why: str
    """The reason."""


@dataclass
class Proof:
    """Counts and failures of a proof."""

    recipes: int = 0
    sizes: int = 0
    configurations: int = 0
    """Number of distinct resolved configurations."""
    models: int = 0
    """Number of rank models of all sizes: the first, a middle and the last pipeline rank of each."""
    built: int = 0
    """Number of distinct rank models."""
    layers: int = 0
    """Number of distinct configurations of Transformer Engine's layers."""
    resolved_now: int = 0
    """Number of sizes resolved in this call; the others were in the cache."""
    built_now: int = 0
    """Number of rank models built in this call."""
    generations: list[str] = field(default_factory=list)
    """GPU generations, such as sm90."""
    versions: dict[str, str] = field(default_factory=dict)
    unproven: dict[str, str] = field(default_factory=dict)
    """Model -> reason why it cannot be built without a GPU."""
    failures: list[Failure] = field(default_factory=list)
    known: list[Failure] = field(default_factory=list)
    """Sizes of models that are known to be broken (`Model.broken`) and fail as expected; they are not failures."""
    digests: dict[Size, SizeDigests] = field(default_factory=dict)
    """Digests of the sizes without a failure."""
    standing: int = 0
    """Number of sizes that were not built, because the committed file contains a build of the same inputs."""
    left: int = 0
    """Number of sizes that were resolved but not built, because of the limit `max_builds`."""


def prove(
    recipes: Iterable[Recipe],
    *,
    cache_file: Path,
    workers: int = 2,
    note: Note = lambda *_: None,
    saved_proof: Mapping[str, Any] | None = None,
    max_builds: int | None = None,
) -> Proof:
    """Verify that every declared size of `recipes` can start, by planning it and building its models.

    Args:
        recipes: the recipes to verify.
        cache_file: JSON file of earlier results; updated during the proof.
        workers: number of processes that build models, which take about 1.5 GiB each.
        note: called with an activity, the number of completed items and their total.
        saved_proof: content of the committed file; inputs that it contains are not built again. Default: build all.
        max_builds: maximum number of configurations to build; each combination of model, precision and parallelism is
            built once before others repeat. Default: no limit.

    Raises:
        UserError: NeMo or Transformer Engine's Python package is not installed.
    """
    versions, recipes = proof_store.versions(), list(recipes)
    sizes = {(recipe.name, nodes): recipe for recipe in recipes for nodes in recipe.nodes}
    planned = plan((recipe, nodes) for (_, nodes), recipe in sizes.items())
    faults = {(failure.recipe, failure.nodes): failure.why for failure in find_refused(planned)}
    size_keys = {size: SizeKey.from_recipe(recipe, size[1]) for size, recipe in sizes.items() if size not in faults}
    cache = ProofCache(cache_file)
    proof = Proof(recipes=len({name for name, _ in sizes}), sizes=len(sizes), versions=versions)
    try:
        with proof_pool.Workers(workers) as pool:
            run = _Run(sizes, size_keys, cache, proof, pool, note)
            resolved_sizes = _resolve(run, faults)
            inputs = _digest_inputs(resolved_sizes, sizes, planned)
            # Models that are known to be broken are always built, to detect when they work again.
            working_inputs = {size: digests for size, digests in inputs.items() if not sizes[size].model.broken}
            unchanged_sizes = proof_store.find_unchanged(saved_proof or {}, working_inputs)
            to_build = {size: digest for size, digest in resolved_sizes.items() if size not in unchanged_sizes}
            outcomes = _build(run, to_build, max_builds)
    finally:
        cache.save()  # also after Ctrl-C
    _add_faults(outcomes, sizes, planned, proof, faults)
    _set_counts(proof, resolved_sizes, outcomes, sizes)
    known_failures = _remove_known_faults({size: sizes[size] for size in size_keys}, set(outcomes), proof, faults)
    proof.failures = [Failure(*size, faults[size]) for size in sizes if size in faults]
    proof.known = [Failure(*size, sizes[size].model.broken) for size in sizes if size in known_failures]
    built_inputs = {size: inputs[size]._replace(built=outcome.get("built", "")) for size, outcome in outcomes.items()}
    digests = inputs | unchanged_sizes | built_inputs
    proof.digests = {
        size: digests[size] for size in resolved_sizes if size not in faults and size not in known_failures
    }
    proof.standing = len(unchanged_sizes)
    proof.left = len(resolved_sizes) - len(unchanged_sizes) - len(outcomes)
    return proof


def _digest_inputs(
    digests: Mapping[Size, str], sizes: Mapping[Size, Recipe], planned_jobs: Mapping[Size, PlannedJob]
) -> dict[Size, SizeDigests]:
    """Return the digests of each size's facts and inputs: resolved configuration (`digests`) and parameter counts."""
    counter = Counter()
    inputs: dict[Size, SizeDigests] = {}
    for size, digest in digests.items():
        recipe, job = sizes[size], planned_jobs[size]
        expected = [digest, counter.count(recipe, job), tolerance(job.model), recipe.gpus_per_node]
        facts = proof_level.facts(recipe, size[1])
        inputs[size] = SizeDigests(facts, proof_store.digest(expected), proof_level.NOT_RECORDED)
    return inputs


def plan(sizes: Iterable[tuple[Recipe, int]]) -> dict[Size, PlannedJob]:
    """Return the planned job of each (recipe, number of nodes)."""
    return {(recipe.name, nodes): jobs.job(recipe, nodes) for recipe, nodes in sizes}


def find_refused(planned_jobs: Mapping[Size, PlannedJob]) -> list[Failure]:
    """Return a failure for each job that is illegal or too large for its GPU, without building anything."""
    failures = []
    predictions = predict.many(list(planned_jobs.values()))
    for ((name, nodes), job), prediction in zip(planned_jobs.items(), predictions, strict=True):
        if prediction.verdict != "ok" or prediction.short_gib > 0:
            reason = prediction.reason or f"{prediction.short_gib:.1f} GiB over the limit of {job.node.gpu.name}"
            failures.append(Failure(name, nodes, f"{prediction.verdict}: {reason}"))
    return failures


@dataclass(frozen=True)
class _Run:
    """The state of a proof in progress."""

    sizes: Mapping[Size, Recipe]
    accepted: Mapping[Size, SizeKey]
    """Keys of the sizes that the planner accepts."""
    cache: ProofCache
    proof: Proof
    pool: proof_pool.Workers
    note: Note


def _resolve(run: _Run, faults: dict[Size, str]) -> dict[Size, str]:
    """Resolve the configurations of all sizes that are not in the cache; return {size: digest}.

    Sizes whose configuration Megatron or NeMo rejects are added to `faults` with the reason.
    """
    cached_inputs = run.cache.resolved
    keys = {size: proof_level.facts(run.sizes[size], size[1]) for size in run.accepted}
    missing_sizes = {keys[size]: key for size, key in run.accepted.items() if keys[size] not in cached_inputs}
    run.proof.resolved_now = len(missing_sizes)
    for results in run.pool.run(rank_models.resolve_all, missing_sizes, RESOLVED_AT_ONCE):
        cached_inputs.update(results)
        run.cache.save_periodically()
        run.note("resolving", sum(key in cached_inputs for key in missing_sizes), len(missing_sizes))
    digests: dict[Size, str] = {}
    for size, key in keys.items():
        resolution = cached_inputs[key]
        if "digest" in resolution:
            digests[size] = resolution["digest"]
        elif "missing" in resolution:
            run.proof.unproven[run.sizes[size].model.name] = resolution["missing"]
        else:
            faults[size] = resolution.get("error", "")
    return digests


def _build(run: _Run, digests: Mapping[Size, str], max_builds: int | None) -> dict[Size, Outcome]:
    """Build the configurations that are not in the cache, at most `max_builds`; return the outcomes by size.

    A digest does not include the number of GPUs. If a constructor reads it nevertheless (`Outcome.world`), the
    configuration is built at the world size of each of its sizes.
    """
    cached_builds = run.cache.built
    worlds = {size: size[1] * run.sizes[size].gpus_per_node for size in digests}
    smallest: dict[str, Size] = {}
    for size in sorted(digests, key=lambda size: (worlds[size], size)):
        smallest.setdefault(digests[size], size)
    if max_builds is not None:
        missing = {digest: size for digest, size in smallest.items() if digest not in cached_builds}
        selected = _sort_by_variety(missing, run.sizes)[:max_builds]
        smallest = {digest: size for digest, size in smallest.items() if digest in cached_builds or digest in selected}
    _build_missing(run, {digest: run.accepted[size] for digest, size in smallest.items()})
    by_world = {digest for digest in smallest if cached_builds[digest].get("world")}
    measured_keys = {size: f"{digest} {worlds[size]}" for size, digest in digests.items() if digest in by_world}
    _build_missing(run, {key: run.accepted[size] for size, key in measured_keys.items()})
    return {
        size: cached_builds[measured_keys.get(size, digest)] for size, digest in digests.items() if digest in smallest
    }


def _sort_by_variety(digests: Mapping[str, Size], sizes: Mapping[Size, Recipe]) -> list[str]:
    """Sort digests so that each combination of model, precision and parallelism occurs once before any repeats."""
    seen: Counted[tuple[object, ...]] = Counted()
    turns: dict[str, int] = {}
    for digest, size in digests.items():
        recipe = sizes[size]
        layout = recipe.layout(size[1])
        parallel = tuple((getattr(layout, name) or 1) > 1 for name in ("tp", "pp", "vp", "cp", "ep", "etp"))
        kind = (recipe.model.name, recipe.task in ADAPTERS, recipe.precision, layout.sp, parallel)
        turns[digest] = seen[kind]
        seen[kind] += 1
    return sorted(turns, key=lambda digest: turns[digest])


def _build_missing(run: _Run, size_keys: Mapping[str, SizeKey]) -> None:
    """Build the models of those `size_keys` that are not in the cache, and add the outcomes to it."""
    cached_builds = run.cache.built
    missing_sizes = {key: size for key, size in size_keys.items() if key not in cached_builds}
    run.proof.built_now += sum(len(resolved.stages(size.layout)) for size in missing_sizes.values())
    for results in run.pool.run(rank_models.build_all, missing_sizes, BUILT_AT_ONCE):
        cached_builds.update(results)
        run.cache.save_periodically()
        run.note("building", sum(key in cached_builds for key in missing_sizes), len(missing_sizes))


def _add_faults(
    outcomes: Mapping[Size, Outcome],
    sizes: Mapping[Size, Recipe],
    planned_jobs: Mapping[Size, PlannedJob],
    proof: Proof,
    faults: dict[Size, str],
) -> None:
    """Add the sizes that could not be built, or whose parameter counts differ from the planner's, to `faults`."""
    counter = Counter()
    for size, outcome in outcomes.items():
        if "missing" in outcome:
            proof.unproven[sizes[size].model.name] = outcome["missing"]
            continue
        fault = outcome.get("error")
        if not fault:
            fault = counter.find_difference(sizes[size], planned_jobs[size], outcome.get("parameters", []))
        if fault:
            faults[size] = fault


def _remove_known_faults(
    sizes: Mapping[Size, Recipe], built: set[Size], proof: Proof, faults: dict[Size, str]
) -> set[Size]:
    """Remove the faults of models that fail as declared in `Model.broken`, and return their sizes.

    If such a model can be built, add a fault: the declaration must be removed.
    """
    known: set[Size] = set()
    for size, recipe in sizes.items():
        reason = recipe.model.broken
        if not reason or recipe.model.name in proof.unproven:
            continue
        if size not in faults and size in built:
            faults[size] = f"the model can be built now: remove `broken` ({reason}) from its declaration"
        elif _identifiers(faults.get(size, "")) & _identifiers(reason):
            known.add(size)
            del faults[size]
    return known


def _identifiers(text: str) -> set[str]:
    """Return the identifiers in an error message, such as rotary_pos_cos_sin."""
    return set(re.findall(r"[A-Za-z]+_\w+", text))


def _set_counts(
    proof: Proof, digests: Mapping[Size, str], outcomes: Mapping[Size, Outcome], sizes: Mapping[Size, Recipe]
) -> None:
    """Set the counts of a proof."""
    ranks = {size: len(resolved.stages(sizes[size].layout(size[1]))) for size in digests}
    proof.configurations = len(set(digests.values()))
    proof.models = sum(ranks.values())
    proof.built = sum({digest: ranks[size] for size, digest in digests.items()}.values())
    proof.layers = len(set[str]().union(*(outcome.get("layers", []) for outcome in outcomes.values())))
    proof.generations = sorted({resolved.generation(sizes[size]) for size in digests})
