"""Proof that recipes can start: each declared size planned, and its real Megatron-Core model built without memory.

Three things are made of a size, and each of them once for all the sizes that it is the same for: Megatron's grid of
ranks at the real world size; the configuration that NeMo's strategy hands to Megatron, whose own checks then run; and
the model of the first, a middle and the last pipeline rank. What was made is remembered by a hash of all it depends on.
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
from typing import Any

from superpod.errors import UserError
from superpod.planner import columns, models, predict
from superpod.planner.memory.lora import adapters
from superpod.planner.memory.units import MemoryUnits
from superpod.planner.planned_job import PlannedJob
from superpod.recipes import planned_job as jobs
from superpod.recipes.registry import ADAPTERS, Recipe, find

ROOT = Path(__file__).resolve().parent.parent
SEEN_BY_BUILDS = ("recipes/*.py", "rehearsal/*.py")
"""Code on which a build depends beside NeMo and Megatron-Core."""
GRID = ("tp", "pp", "vp", "cp", "ep", "etp")
"""Degrees of Megatron's grid of ranks."""
STAGES = ("embedding_as_layer", "loss_as_layer", "first_layers", "last_layers", "chunks")
WEIGHTS = (*(name for name in GRID if name != "cp"), *STAGES)
"""Fields of a layout on which a rank's parameters depend."""
BATCH = 20
"""What a process makes between two notes."""
NOT_SEEN = ("gbs", "mbs")
"""Fields that the strategy does not hand to Megatron."""
Build = dict[str, Any]
"""What is made: {"kind": "model", "config" or "grid", "seen", "recipe", "nodes", "world", "ranks"}."""


@dataclass
class Proof:
    """What was found."""

    recipes: int = 0
    sizes: int = 0
    builds: int = 0
    """Rank models that the sizes have: first, middle and last pipeline rank of each."""
    unique: int = 0
    """Of those, different ones."""
    configs: int = 0
    """Different configurations, each checked by Megatron."""
    grids: int = 0
    """Different grids of ranks, at their real world sizes."""
    fresh: int = 0
    """Of all these, what had to be made now; the rest was remembered."""
    unproven: dict[str, str] = field(default_factory=dict)
    """Model -> why it cannot be built without a GPU."""
    failures: list[str] = field(default_factory=list)
    """`recipe at N nodes: what is wrong`."""


def prove(
    recipes: Iterable[Recipe], *, cache_file: Path, workers: int = 2, note: Callable[[int, int], None] = lambda *_: None
) -> Proof:
    """Plan and build every declared size of `recipes`.

    Args:
        recipes: which.
        cache_file: JSON of what was built before; written as builds finish.
        workers: processes that build, each about 1 GiB.
        note: called with (done, all) as builds finish.
    """
    sizes = [(recipe, nodes) for recipe in recipes for nodes in recipe.nodes]
    planned = plan(sizes)
    proof = Proof(recipes=len({recipe.name for recipe, _ in sizes}), sizes=len(sizes), failures=refused(planned))
    wanted: dict[str, Build] = {}
    used: dict[str, list[tuple[str, int]]] = {}
    for recipe, nodes in sizes:
        if recipe.model.unproven:
            proof.unproven[recipe.model.name] = recipe.model.unproven
            continue
        for build in (_grid(recipe, nodes), _config(recipe, nodes), _model(recipe, nodes)):
            key = _key(build)
            wanted.setdefault(key, build)
            used.setdefault(key, []).append((recipe.name, nodes))
    proof.builds = sum(len(wanted[key]["ranks"]) * len(users) for key, users in used.items() if _is_model(wanted[key]))
    proof.unique = sum(len(build["ranks"]) for build in wanted.values() if _is_model(build))
    proof.grids = sum(build["kind"] == "grid" for build in wanted.values())
    proof.configs = sum(build["kind"] == "config" for build in wanted.values())
    known = _remembered(cache_file)
    missing = {key: build for key, build in wanted.items() if key not in known}
    proof.fresh = len(missing)
    known |= _build_all(missing, known, cache_file, workers, note)
    for key, build in wanted.items():
        if problem := known[key].get("error") or _differs(build, known[key], planned):
            name, nodes = used[key][0]
            more = f" (and {len(used[key]) - 1} more)" if len(used[key]) > 1 else ""
            proof.failures.append(f"{name} at {nodes} nodes{more}: {problem}")
    return proof


def plan(sizes: Iterable[tuple[Recipe, int]]) -> dict[tuple[str, int], PlannedJob]:
    """The job of every recipe's size, in nodes; by the recipe's name and the nodes."""
    return {(recipe.name, nodes): jobs.job(recipe, nodes) for recipe, nodes in sizes}


def refused(planned: Mapping[tuple[str, int], PlannedJob]) -> list[str]:
    """What is illegal, or too large for its GPU, in words; builds nothing."""
    failures = []
    for (name, nodes), job, found in zip(planned, planned.values(), predict.many(list(planned.values())), strict=True):
        if found.verdict != "ok" or found.tight:
            why = found.reason or f"{found.short_gib:.1f} GiB over the limit of {job.node.gpu.name}"
            failures.append(f"{name} at {nodes} nodes: {found.verdict}: {why}")
    return failures


def _is_model(build: Build) -> bool:
    return build["kind"] == "model"


def _model(recipe: Recipe, nodes: int) -> Build:
    """The models of the first, a middle and the last pipeline rank."""
    layout = recipe.layout(nodes)
    stages = sorted({0, layout.pp // 2, layout.pp - 1})
    each = nodes * recipe.gpus_per_node // layout.pp
    rows = recipe.seq if models.find(recipe.model.name).positions else 0  # of a learned table of positions
    seen = {**_whose(recipe), "positions": rows, **{name: getattr(layout, name) for name in WEIGHTS}}
    return _build("model", recipe, nodes, seen, [stage * each for stage in stages])


def _config(recipe: Recipe, nodes: int) -> Build:
    """What NeMo's strategy hands to Megatron, without the data-parallel size."""
    layout = {name: value for name, value in vars(recipe.layout(nodes)).items() if name not in NOT_SEEN}
    return _build("config", recipe, nodes, {**_whose(recipe), "seq": recipe.seq, **layout}, [0])


def _grid(recipe: Recipe, nodes: int) -> Build:
    """Megatron's groups of ranks at the real world size."""
    seen = {name: getattr(recipe.layout(nodes), name) for name in GRID}
    world = nodes * recipe.gpus_per_node
    return _build("grid", recipe, nodes, {"world": world, **seen}, [world - 1])


def _whose(recipe: Recipe) -> dict[str, Any]:
    adapter = recipe.task if recipe.task in ADAPTERS else ""
    return {"model": recipe.model.name, "adapter": adapter, "mtp": recipe.shape.mtp_layers}


def _build(kind: str, recipe: Recipe, nodes: int, seen: dict[str, Any], ranks: list[int]) -> Build:
    world = nodes * recipe.gpus_per_node
    return {"kind": kind, "seen": seen, "recipe": recipe.name, "nodes": nodes, "world": world, "ranks": ranks}


def _key(build: Build) -> str:
    seen = json.dumps([build["kind"], build["seen"], fingerprint()], sort_keys=True)
    return hashlib.sha256(seen.encode()).hexdigest()[:24]


@cache
def fingerprint() -> str:
    """Hash of the code that a build runs: ours, and the versions of NeMo, Megatron-Core and torch."""
    found = hashlib.sha256()
    for package in ("nemo_toolkit", "megatron-core", "torch"):
        found.update(importlib.metadata.version(package).encode())
    for pattern in SEEN_BY_BUILDS:
        for path in sorted(ROOT.glob(pattern)):
            found.update(path.read_bytes())
    return found.hexdigest()


def _remembered(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _build_all(
    missing: dict[str, Build], known: dict[str, Any], path: Path, workers: int, note: Callable[[int, int], None]
) -> dict[str, Any]:
    """Build what is missing, a batch per process at a time, and remember each batch."""
    if not missing:
        return {}
    done: dict[str, Any] = {}
    order = sorted(missing, key=lambda key: (missing[key]["recipe"], key))
    # NeMo's LlamaEmbeddingModel cannot be made in a process that has made a LlamaModel.
    apart = [key for key in order if find(missing[key]["recipe"]).model.family == "encoders"]
    context = multiprocessing.get_context("spawn")
    for keys in (apart, [key for key in order if key not in apart]):
        batches = [keys[i : i + BATCH] for i in range(0, len(keys), BATCH)]
        with ProcessPoolExecutor(workers, mp_context=context, initializer=_ready) as pool:
            asked = ([missing[key] for key in batch] for batch in batches)
            for batch, found in zip(batches, pool.map(_build_batch, asked), strict=True):
                done |= dict(zip(batch, found, strict=True))
                _remember(path, known | done)
                note(len(done), len(missing))
    return done


def _remember(path: Path, known: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(known, sort_keys=True))
    os.replace(partial, path)


def _ready() -> None:
    """A process that builds: NeMo, without what needs a GPU, and without its talk."""
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import superpod.rehearsal.entry  # noqa: F401 - before NeMo: Gemma 2 and 3 need its classes


def _build_batch(builds: list[Build]) -> list[dict[str, Any]]:
    return [_built(build) for build in builds]


def _built(build: Build) -> dict[str, Any]:
    """Parameters of each chunk of each rank; of a grid or a configuration, nothing but that Megatron takes it."""
    import fiddle as fdl

    from superpod.recipes import build as build_recipe
    from superpod.rehearsal import dry

    try:
        partial = build_recipe(build["recipe"], build["nodes"])
        if not _is_model(build):
            strategy = fdl.build(partial.trainer.strategy)
            with dry.fake_ranks(build["ranks"][0], build["world"], **dry.degrees(strategy)):
                if build["kind"] == "config":
                    dry.connected_config(partial, strategy)
                return {}
        return {"parameters": [dry.dry_build(partial, rank, build["world"]) for rank in build["ranks"]]}
    except Exception as refused:  # whatever Megatron or NeMo raises is the finding
        return {"error": f"{type(refused).__name__}: {refused}".strip().replace("\n", " ")[:500]}


def _differs(build: Build, found: dict[str, Any], planned: dict[tuple[str, int], PlannedJob]) -> str:
    """Where the planner counts other parameters than the real model has; "" where it agrees."""
    if not _is_model(build):
        return ""
    job = planned[build["recipe"], build["nodes"]]
    model, layout = job.model, job.layout
    if build["seen"]["adapter"] and not _adapters_known(build, model):
        return ""
    extra = _adapters(job) if build["seen"]["adapter"] else [0] * layout.pp
    for rank, real in zip(build["ranks"], found["parameters"], strict=True):
        stage = rank // (build["world"] // layout.pp)
        try:
            counted = sum(chunk.total for chunk in model.chunk_parameters(job.split, stage)) + extra[stage]
        except UserError as refused:
            return str(refused)
        if counted != sum(real):
            return f"rank {rank} holds {sum(real):,} parameters, and the planner counts {counted:,}"
    return ""


def _adapters_known(build: Build, model: models.ModelShape) -> bool:
    """Whether the planner counts the adapters that are built here to the parameter.

    Latent attention and layers of different widths are counted on the average; DoRA has a magnitude per output beside
    LoRA's matrices.
    """
    return build["seen"]["adapter"] == "lora" and not (model.kv_lora or model.runs)


def _adapters(job: PlannedJob) -> list[int]:
    """Parameters of the LoRA adapters on each pipeline rank."""
    found = adapters(MemoryUnits(job, columns.of(job))).dense
    return [round(float(each)) for each in found.reshape(-1)]
