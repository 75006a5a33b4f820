"""A job's recipe as the one Python file that its ranks run, and the facts of it. Built once, then kept.

Building imports NeMo, which takes 10 to 20 s; a recipe that has not changed comes from the cache in milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from superpod.launchers.local import Job
from superpod.node.files import read_json, write_json
from superpod.node.payload import PACKAGE


@dataclass(frozen=True)
class Exported:
    """A recipe, ready to be sent."""

    source: str
    """the file: `recipe()` returns the run.Partial"""
    lines: list[str]
    """recipe.txt"""
    nodes: int
    gpus: int
    """ranks a node"""
    max_steps: int
    save_every: int
    """steps between two checkpoints; 0 = none"""
    plan: dict[str, Any]
    """plan.json"""
    facts: dict[str, Any] = field(default_factory=dict)


def export(job: Job, *, fresh: bool = False) -> Exported:
    """The job's recipe as a file, from the cache where nothing that it depends on has changed.

    Raises:
        UserError: no such recipe, an override that names nothing, an illegal layout, or no NeMo to build it with.
    """
    path = cache() / f"{_key(job)}.json"
    if not fresh and (known := read_json(path)):
        return Exported(**known)
    found = _build(job)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(found))
    except OSError:
        pass  # a home that cannot be written costs time, not the job
    return found


def is_known(job: Job) -> bool:
    """Whether `export` will not have to import NeMo."""
    return (cache() / f"{_key(job)}.json").is_file()


def cache() -> Path:
    """Where built recipes are kept: $XDG_CACHE_HOME/superpod/recipes."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "superpod" / "recipes"


def _key(job: Job) -> str:
    """Of everything that the file depends on: the job, its data, our sources, and the versions of NeMo's stack."""
    from superpod.node.versions import versions

    digest = hashlib.sha256(json.dumps([job.recipe, job.facts(), versions()], sort_keys=True, default=str).encode())
    files = [
        p
        for part in ("recipes", "planner")
        for p in sorted((PACKAGE / part).rglob("*.*"))
        if "__pycache__" not in p.parts
    ]
    if job.data:
        files.append(job.data / "dataset.json")
    for path in [*files, Path(__file__)]:
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()[:32]


def _build(job: Job) -> Exported:
    from superpod.launchers.local import still_a_recipe, use_data
    from superpod.planner import legality, plans
    from superpod.recipes import build, flatten, overrides
    from superpod.recipes.export import source
    from superpod.recipes.planned_job import of_partial
    from superpod.recipes.registry import find

    partial = build(job.recipe, job.num_nodes)
    facts = use_data(partial, job.data) if job.data else {}
    overrides.apply(partial, job.overrides)
    still_a_recipe(partial, job.overrides)
    planned = of_partial(partial, find(job.recipe))
    legality.require(planned)
    trainer = partial.trainer
    heading = f"{job.recipe} on {trainer.num_nodes} nodes x {trainer.devices} GPUs, as it was submitted."
    return Exported(
        source=source.source(partial, heading),
        lines=[str(line) for line in flatten.flatten(partial)],
        nodes=trainer.num_nodes,
        gpus=trainer.devices,
        max_steps=trainer.max_steps,
        save_every=partial.log.ckpt.every_n_train_steps or 0,
        plan=plans.of_run(planned),
        facts=facts,
    )
