"""Proves that recipes can start: plans each declared size, and builds its real Megatron-Core model without memory.

For each size it builds three things, each once for all sizes that share it: Megatron's grid of ranks at the real world
size; the configuration that NeMo's strategy gives to Megatron, whose own checks then run; and the model of the first, a
middle and the last pipeline rank. A file keeps the results, each under a hash of everything that it depends on.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypedDict

from superpod.errors import UserError
from superpod.planner import columns, models, predict
from superpod.planner.memory.lora import adapters
from superpod.planner.memory.units import MemoryUnits
from superpod.planner.planned_job import PlannedJob
from superpod.recipes import planned_job as jobs
from superpod.recipes.registry import ADAPTERS, Recipe, find

ROOT = Path(__file__).resolve().parent.parent
CODE_OF_BUILDS = ("recipes/*.py", "rehearsal/*.py", "rehearsal/patches/*.py")
"""Code on which a build depends, beside NeMo and Megatron-Core."""
GRID = ("tp", "pp", "vp", "cp", "ep", "etp")
"""Degrees of Megatron's grid of ranks."""
STAGES = ("embedding_as_layer", "loss_as_layer", "first_layers", "last_layers", "chunks")
WEIGHTS = (*(name for name in GRID if name != "cp"), *STAGES)
"""Fields of a layout on which a rank's parameters depend."""
BATCH = 20
"""Builds of a process between two calls of `note`."""
NOT_IN_CONFIG = ("gbs", "mbs")
"""Fields that the strategy does not give to Megatron."""
Kind = Literal["model", "config", "grid"]
Size = tuple[str, int]
"""A recipe's name and a number of nodes."""


class Build(TypedDict):
    """Something to build, of one size of a recipe."""

    kind: Kind
    inputs: dict[str, Any]
    """What the build depends on, with `kind`: two builds with equal inputs are one."""
    recipe: str
    nodes: int
    world: int
    """GPUs."""
    ranks: list[int]


class Outcome(TypedDict, total=False):
    """Result of a build; empty for a grid or a configuration that Megatron accepts."""

    parameters: list[list[int]]
    """Of each rank, the parameters of each of its chunks."""
    error: str


@dataclass
class Proof:
    """Counts and failures of a proof."""

    recipes: int = 0
    sizes: int = 0
    builds: int = 0
    """Rank models of all sizes: first, middle and last pipeline rank of each."""
    unique: int = 0
    """Different ones among them."""
    configs: int = 0
    """Different configurations, each checked by Megatron."""
    grids: int = 0
    """Different grids of ranks, at their real world sizes."""
    fresh: int = 0
    """Builds of this call; the results of the others were in the file."""
    unproven: dict[str, str] = field(default_factory=dict)
    """Model -> why it cannot be built without a GPU."""
    failures: list[str] = field(default_factory=list)
    """`recipe at N nodes: the fault`."""


def prove(
    recipes: Iterable[Recipe], *, cache_file: Path, workers: int = 2, note: Callable[[int, int], None] = lambda *_: None
) -> Proof:
    """Plan and build every declared size of `recipes`.

    Args:
        recipes: the recipes to prove.
        cache_file: JSON of earlier results; written as builds finish.
        workers: processes that build, each about 1 GiB.
        note: called with (done, all) as builds finish.
    """
    sizes = [(recipe, nodes) for recipe in recipes for nodes in recipe.nodes]
    planned = plan(sizes)
    proof = Proof(recipes=len({recipe.name for recipe, _ in sizes}), sizes=len(sizes), failures=refused(planned))
    builds: dict[str, Build] = {}
    users: dict[str, list[Size]] = {}
    for recipe, nodes in sizes:
        if recipe.model.unproven:
            proof.unproven[recipe.model.name] = recipe.model.unproven
            continue
        for build in (_grid(recipe, nodes), _config(recipe, nodes), _model(recipe, nodes)):
            key = _key(build)
            builds.setdefault(key, build)
            users.setdefault(key, []).append((recipe.name, nodes))
    _count(proof, builds, users)
    outcomes = _read_outcomes(cache_file)
    missing = {key: build for key, build in builds.items() if key not in outcomes}
    proof.fresh = len(missing)
    outcomes |= _build_all(missing, outcomes, cache_file, workers, note)
    for key, build in builds.items():
        if fault := outcomes[key].get("error") or _count_difference(build, outcomes[key], planned):
            name, nodes = users[key][0]
            more = f" (and {len(users[key]) - 1} more)" if len(users[key]) > 1 else ""
            proof.failures.append(f"{name} at {nodes} nodes{more}: {fault}")
    return proof


def _count(proof: Proof, builds: dict[str, Build], users: dict[str, list[Size]]) -> None:
    rank_models = {key: len(build["ranks"]) for key, build in builds.items() if build["kind"] == "model"}
    proof.builds = sum(ranks * len(users[key]) for key, ranks in rank_models.items())
    proof.unique = sum(rank_models.values())
    proof.grids = sum(build["kind"] == "grid" for build in builds.values())
    proof.configs = sum(build["kind"] == "config" for build in builds.values())


def plan(sizes: Iterable[tuple[Recipe, int]]) -> dict[Size, PlannedJob]:
    """The planned job of every recipe at so many nodes."""
    return {(recipe.name, nodes): jobs.job(recipe, nodes) for recipe, nodes in sizes}


def refused(planned: Mapping[Size, PlannedJob]) -> list[str]:
    """A line for every job that is illegal or too large for its GPU; builds nothing."""
    failures = []
    predictions = predict.many(list(planned.values()))
    for ((name, nodes), job), prediction in zip(planned.items(), predictions, strict=True):
        if prediction.verdict != "ok" or prediction.tight:
            reason = prediction.reason or f"{prediction.short_gib:.1f} GiB over the limit of {job.node.gpu.name}"
            failures.append(f"{name} at {nodes} nodes: {prediction.verdict}: {reason}")
    return failures


def _model(recipe: Recipe, nodes: int) -> Build:
    """The models of the first, a middle and the last pipeline rank."""
    layout = recipe.layout(nodes)
    stages = sorted({0, layout.pp // 2, layout.pp - 1})
    ranks_per_stage = nodes * recipe.gpus_per_node // layout.pp
    rows = recipe.seq if models.find(recipe.model.name).positions else 0  # of a learned table of positions
    inputs = {**_model_inputs(recipe), "positions": rows, **{name: getattr(layout, name) for name in WEIGHTS}}
    return _build("model", recipe, nodes, inputs, [stage * ranks_per_stage for stage in stages])


def _config(recipe: Recipe, nodes: int) -> Build:
    """The configuration that NeMo's strategy gives to Megatron, without the data-parallel size."""
    layout = {name: value for name, value in vars(recipe.layout(nodes)).items() if name not in NOT_IN_CONFIG}
    return _build("config", recipe, nodes, {**_model_inputs(recipe), "seq": recipe.seq, **layout}, [0])


def _grid(recipe: Recipe, nodes: int) -> Build:
    """Megatron's groups of ranks at the real world size."""
    degrees = {name: getattr(recipe.layout(nodes), name) for name in GRID}
    world = nodes * recipe.gpus_per_node
    return _build("grid", recipe, nodes, {"world": world, **degrees}, [world - 1])


def _model_inputs(recipe: Recipe) -> dict[str, Any]:
    adapter = recipe.task if recipe.task in ADAPTERS else ""
    return {"model": recipe.model.name, "adapter": adapter, "mtp": recipe.shape.mtp_layers}


def _build(kind: Kind, recipe: Recipe, nodes: int, inputs: dict[str, Any], ranks: list[int]) -> Build:
    world = nodes * recipe.gpus_per_node
    return {"kind": kind, "inputs": inputs, "recipe": recipe.name, "nodes": nodes, "world": world, "ranks": ranks}


def _key(build: Build) -> str:
    text = json.dumps([build["kind"], build["inputs"], fingerprint()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@cache
def fingerprint() -> str:
    """Hash of the code that a build runs: ours, and the versions of NeMo, Megatron-Core and torch."""
    code = hashlib.sha256()
    for package in ("nemo_toolkit", "megatron-core", "torch"):
        code.update(importlib.metadata.version(package).encode())
    for pattern in CODE_OF_BUILDS:
        for path in sorted(ROOT.glob(pattern)):
            code.update(path.read_bytes())
    return code.hexdigest()


def _read_outcomes(path: Path) -> dict[str, Outcome]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _build_all(
    missing: dict[str, Build], known: dict[str, Outcome], path: Path, workers: int, note: Callable[[int, int], None]
) -> dict[str, Outcome]:
    """Build what is missing, a batch per process at a time, and write the file after each batch."""
    if not missing:
        return {}
    done: dict[str, Outcome] = {}
    order = sorted(missing, key=lambda key: (missing[key]["recipe"], key))
    # NeMo's LlamaEmbeddingModel cannot be built in a process that has built a LlamaModel: encoders get their own pool.
    encoders = [key for key in order if find(missing[key]["recipe"]).model.family == "encoders"]
    context = multiprocessing.get_context("spawn")
    for keys in (encoders, [key for key in order if key not in encoders]):
        batches = [keys[i : i + BATCH] for i in range(0, len(keys), BATCH)]
        with ProcessPoolExecutor(workers, mp_context=context, initializer=_import_nemo) as pool:
            builds = ([missing[key] for key in batch] for batch in batches)
            for batch, outcomes in zip(batches, pool.map(_build_batch, builds), strict=True):
                done |= dict(zip(batch, outcomes, strict=True))
                _write_outcomes(path, known | done)
                note(len(done), len(missing))
    return done


def _write_outcomes(path: Path, outcomes: dict[str, Outcome]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(outcomes, sort_keys=True))
    os.replace(partial, path)  # so that a process that ends early leaves no half file


def _import_nemo() -> None:
    """Prepare a process that builds: the patches, then NeMo, without its warnings."""
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import superpod.rehearsal.entry  # noqa: F401 - before NeMo: Gemma 2 and 3 need its classes


def _build_batch(builds: list[Build]) -> list[Outcome]:
    return [_built(build) for build in builds]


def _built(build: Build) -> Outcome:
    """Build it: parameters for a model, nothing for a grid or a configuration that Megatron accepts, or the error."""
    import fiddle as fdl

    from superpod.recipes import build as build_recipe
    from superpod.rehearsal import meta_build

    try:
        partial = build_recipe(build["recipe"], build["nodes"])
        if build["kind"] != "model":
            strategy: Any = fdl.build(partial.trainer.strategy)
            with meta_build.fake_ranks(build["ranks"][0], build["world"], **meta_build.degrees(strategy)):
                if build["kind"] == "config":
                    meta_build.connected_config(partial, strategy)
                return {}
        return {"parameters": [meta_build.dry_build(partial, rank, build["world"]) for rank in build["ranks"]]}
    except Exception as error:  # whatever Megatron or NeMo raises is the result
        return {"error": f"{type(error).__name__}: {error}".strip().replace("\n", " ")[:500]}


def _count_difference(build: Build, outcome: Outcome, planned: dict[Size, PlannedJob]) -> str:
    """The rank for which the planner counts other parameters than the real model has; "" if there is none."""
    if build["kind"] != "model":
        return ""
    job = planned[build["recipe"], build["nodes"]]
    model, layout = job.model, job.layout
    if build["inputs"]["adapter"] and not _adapters_known(build, model):
        return ""
    extra = _adapters(job) if build["inputs"]["adapter"] else [0] * layout.pp
    for rank, real in zip(build["ranks"], outcome.get("parameters", []), strict=True):
        stage = rank // (build["world"] // layout.pp)
        try:
            counted = sum(chunk.total for chunk in model.chunk_parameters(job.split, stage)) + extra[stage]
        except UserError as refused:
            return str(refused)
        if counted != sum(real):
            return f"rank {rank} holds {sum(real):,} parameters, and the planner counts {counted:,}"
    return ""


def _adapters_known(build: Build, model: models.ModelShape) -> bool:
    """Whether the planner counts the adapters of this build exactly.

    It averages over latent attention's projections and over layers of different widths, and it leaves out DoRA's
    magnitude per output.
    """
    return build["inputs"]["adapter"] == "lora" and not (model.kv_lora or model.runs)


def _adapters(job: PlannedJob) -> list[int]:
    """Parameters of the LoRA adapters on each pipeline rank."""
    per_stage = adapters(MemoryUnits(job, columns.of(job))).dense
    return [round(float(count)) for count in per_stage.reshape(-1)]
