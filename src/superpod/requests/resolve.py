"""Resolve a request: determine every value of a run once, for local runs, exports, jobs and checks.

`resolve` builds the recipe with NeMo, whose import takes 10 to 20 s. `resolve_cached` returns the result as plain data,
including the Python file that the ranks execute, from a cache if no input has changed. If NeMo or the data are missing,
`deferred.py` defers the build to the nodes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.common import collection, package_files
from superpod.common.json_files import write_json
from superpod.errors import UserError
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob
from superpod.requests.request import Request
from superpod.runtime.runs import owner

if TYPE_CHECKING:
    import nemo_run as run

    from superpod.planner.rules.rules import Violation


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A resolved request: overrides, data and size are applied, so that no consumer reads the recipe again."""

    request: Request
    job: PlannedJob
    """the planner's job: model, GPUs, precision and layout"""
    plan: dict[str, Any]
    """content of plan.json: the planner's prediction"""
    nodes: int
    gpus_per_node: int
    max_steps: int
    save_every: int
    """steps between two checkpoints; 0 = no checkpoints"""
    data_facts: dict[str, Any]
    """statistics of the data, for reports"""
    lines: list[str]
    """lines of recipe.txt"""
    source: str = field(default="", repr=False)
    """text of the Python file that the ranks execute, whose `recipe()` returns the partial; "" before the export"""
    is_deferred: bool = False
    """whether it was resolved without NeMo or without its data, so that the ranks build the request in `source`"""

    @property
    def layout(self) -> Layout:
        """The parallel layout."""
        return self.job.layout

    @property
    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint in bytes, including the optimizer state."""
        return int(self.plan["layouts"][0]["checkpoint_bytes"])

    @property
    def step_time_s(self) -> float | None:
        """Predicted step time in seconds; None if the planner cannot predict it."""
        return self.plan["layouts"][0]["step_time_s"]


@dataclass(frozen=True, kw_only=True)
class BuiltRun(ResolvedRun):
    """A resolved run with its NeMo configuration, which can be trained or exported."""

    partial: run.Partial = field(compare=False, repr=False)

    def export(self) -> ResolvedRun:
        """Return the run as plain data, with the Python file `source` instead of `partial`."""
        from superpod.collection.facts import environment
        from superpod.nemo2.export import recipe_source

        heading = f"{self.request.recipe} on {self.nodes} nodes x {self.gpus_per_node} GPUs, as submitted."
        values: dict[str, Any] = {entry.name: getattr(self, entry.name) for entry in fields(ResolvedRun)}
        variables = environment.variables(self.job, self.request.overrides)
        values["source"] = recipe_source.render(self.partial, heading, variables)
        return ResolvedRun(**values)


def resolve(request: Request, statistics: dict[str, Any] | None = None) -> BuiltRun:
    """Build the recipe of a request and determine all values of the run.

    `statistics` are those of the data, if they are already computed. Raises UserError for an unknown recipe, an invalid
    override or an illegal layout, and if NeMo is not installed.
    """
    partial, data_facts = build_configuration(request, statistics)

    from superpod.nemo2 import validation as rules
    from superpod.nemo2.export import flatten
    from superpod.planner import plans
    from superpod.requests import subject

    require_runnable(partial, request.overrides)
    rules.require(rules.violations(partial, request.overrides, chain=subject.subject_kind(request.recipe) != "nemo"))
    job = plan_job(partial, request)
    rules.require(job_violations(partial, job))
    rules.require(rules.start_violations(partial, request.overrides, job))
    trainer = partial.trainer
    return BuiltRun(
        request=request,
        job=job,
        plan=plans.describe_run(job),
        nodes=trainer.num_nodes,
        gpus_per_node=trainer.devices,
        max_steps=trainer.max_steps,
        save_every=partial.log.ckpt.every_n_train_steps or 0,
        data_facts=data_facts,
        lines=[str(line) for line in flatten.flatten(partial)],
        partial=partial,
    )


def plan_job(partial: run.Partial, request: Request) -> PlannedJob:
    """Return the planner's job for the built configuration of a request. The model of a recipe is the declared one.

    Raises UserError if the planner does not know the model, or its sizes are inconsistent.
    """
    from superpod.collection.registry import find
    from superpod.nemo2.validation import configured_job
    from superpod.planner import hardware
    from superpod.requests import subject

    if subject.subject_kind(request.recipe) != "recipe":
        return configured_job.job_from_configuration(partial, subject.select_gpu(partial, request.gpu))
    job = configured_job.job_from_partial(partial, find(request.recipe))
    if not request.gpu:
        return job
    node = hardware.builtin().node(request.gpu)
    return job.replace(node=node, fabric=hardware.builtin().fabric_of(node))


def job_violations(partial: run.Partial, job: PlannedJob) -> list[Violation]:
    """Return the violations of rules on layout, precision and hardware by a configuration and its planned job."""
    from superpod.nemo2.validation import training
    from superpod.nemo2.validation.reading import Reader
    from superpod.planner import legality

    return [*training.check_devices(Reader(partial), job.node.gpus, job.node.gpu.name), *legality.violations(job)]


def build_configuration(
    request: Request, statistics: dict[str, Any] | None = None
) -> tuple[run.Partial, dict[str, Any]]:
    """Build the recipe and apply the size, data and overrides of a request, in this order.

    Returns the configuration and the statistics of the data, which are `statistics` if given. Raises UserError for an
    unknown recipe or field, and if NeMo is not installed.
    """
    from superpod.requests import subject

    partial = subject.build(request)
    # After `subject.build`, whose error has the command that installs NeMo-Run.
    from superpod.nemo2 import overrides
    from superpod.nemo2.build import learning_rate_schedule

    data_facts = use_data(partial, request.data, statistics) if request.data else {}
    overrides.apply(partial, list(request.overrides))
    overrides.align_lengths(partial, request.overrides)
    if subject.subject_kind(request.recipe) == "recipe":  # files and NeMo's recipes keep their schedule
        learning_rate_schedule.fit(partial, request.overrides)
    if request.profile:
        from superpod.requests.profile_request import ProfileRequest

        ProfileRequest.parse(request.profile).add_to(partial)
    return partial, data_facts


def use_data(partial: run.Partial, path: Path, statistics: dict[str, Any] | None = None) -> dict[str, Any]:
    """Set the data module of a configuration to the data folder `path`; return the statistics of the data.

    If `statistics` is given, it is returned instead.
    """
    from superpod.data.folder import DataFolder
    from superpod.nemo2.data_module import data_module

    folder = DataFolder.load(path)
    sizes = {k: getattr(partial.data, k) for k in ("seq_length", "micro_batch_size", "global_batch_size")}
    partial.data = data_module(folder, **sizes)
    # With few documents or a short run, an epoch has fewer batches than the validation interval, and Lightning would
    # stop before the first step.
    partial.trainer.check_val_every_n_epoch = None
    documents = folder.split_documents()
    if not documents["test"]:
        partial.trainer.limit_test_batches = 0
    if not documents["validation"]:
        partial.trainer.limit_val_batches = 0
    return describe_data(path) if statistics is None else statistics


def describe_data(path: Path) -> dict[str, Any]:
    """Return the unigram entropy of a data folder's validation data in nats; {} without any. Reads all its tokens."""
    from superpod.data.folder import DataFolder
    from superpod.data.tokens.entropy import unigram_entropy

    folder = DataFolder.load(path)
    if not folder.split_documents()["validation"]:
        return {}
    return {"unigram_entropy_nats": unigram_entropy(folder)}


_PARTS = ("model.config", "data", "trainer.strategy.ddp", "log.ckpt", "resume", "optim.config")
_RUN_PATHS = ("log.explicit_log_dir", "log.ckpt.dirpath", "resume.resume_from_directory")
_COUNTS = ("trainer.devices", "trainer.num_nodes", "trainer.max_steps")


def require_runnable(partial: run.Partial, overrides: tuple[str, ...]) -> None:
    """Raise UserError if overrides removed a required part, set an invalid count, or changed the run folder's paths."""
    import fiddle as fdl

    _replace_missing_callbacks(partial, overrides)
    for path in _PARTS:
        node = partial
        for name in path.split("."):
            node = getattr(node, name, None)
            if node == "megatron" and path.endswith(".ddp") and not any(path in text for text in overrides):
                continue  # NeMo's own fine-tuning recipes use MegatronStrategy's default
            if not isinstance(node, fdl.Buildable):
                raise UserError(
                    f"the overrides make the recipe incomplete: {path} must be a configuration, but {name} is {node!r}",
                    f"correct the override of {path}",
                )
    if not isinstance(partial.trainer.callbacks, list):
        raise UserError(f"trainer.callbacks must be a list, not {partial.trainer.callbacks!r}", "correct the override")
    for path in _COUNTS:
        value = getattr(partial.trainer, path.partition(".")[2])
        if type(value) is not int or value < 1:
            raise UserError(f"{path} must be an integer of at least 1, not {value!r}", "correct the override")
    for text in overrides:
        if text.startswith(_RUN_PATHS):
            raise UserError(
                f"override {text.partition('=')[0]}: a run always writes to its run folder",
                "specify the folder for runs with --runs",
            )


def _replace_missing_callbacks(partial: run.Partial, overrides: tuple[str, ...]) -> None:
    """Set callbacks=None, as in NeMo's long-context recipes, to an empty list, unless an override sets it."""
    if partial.trainer.callbacks is None and not any("callbacks" in text for text in overrides):
        partial.trainer.callbacks = []


# -- the cache of resolved runs -------------------------------------------------------------------------------------


def resolve_cached(request: Request) -> ResolvedRun:
    """Return the resolved run of a request as plain data, from the cache if possible; otherwise build and cache it.

    Raises UserError in the same cases as `resolve`.
    """
    from pydantic import TypeAdapter, ValidationError

    path, adapter = cache_folder() / f"{_cache_key(request)}.json", TypeAdapter(ResolvedRun)
    try:
        owner.refuse_writable(path)  # the file contains code, and XDG_CACHE_HOME may be shared
        return adapter.validate_json(path.read_bytes())
    except (OSError, ValidationError, UserError):
        pass  # missing, truncated, or writable by others: build it
    data = adapter.dump_python(resolve(request).export(), mode="json")
    try:
        with owner.restrict_umask():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, data)
    except OSError:
        pass  # a read-only home folder only disables the cache
    return adapter.validate_python(data)  # the same types as from the cache, where JSON has lists instead of tuples


def is_cached(request: Request) -> bool:
    """Return whether the resolved run of a request is in the cache. Does not import NeMo."""
    return (cache_folder() / f"{_cache_key(request)}.json").is_file()


def cache_folder() -> Path:
    """Return the cache folder for resolved runs: $XDG_CACHE_HOME/superpod/recipes."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "superpod" / "recipes"


SOURCES = (
    "common",
    "planner",
    "collection",
    "included/recipes/models",
    "included/recipes/layouts",
    "data",
    "nemo2",
    "weights",
    "requests",
    "reports",
    "profiles",
)
"""Folders of this package with the code and data on which the result of `resolve` depends."""


def _cache_key(request: Request) -> str:
    """Return a hash of all inputs of `resolve`: the request, its data, this package's sources, and NeMo's versions."""
    from superpod.runtime.runs.versions import versions

    inputs = json.dumps([request.recipe, request.facts(), versions()], sort_keys=True, default=str)
    data = [("dataset.json", request.data / "dataset.json")] if request.data else []
    return hashlib.sha256(inputs.encode() + hash_sources(SOURCES, data)).hexdigest()[:32]


def hash_sources(folders: Sequence[str], more: Sequence[tuple[str, Path]] = ()) -> bytes:
    """Return the SHA-256 of this package's files in `folders`, of user collections, and of `more` (name, file)."""
    files = [*package_files.files([".", *folders]).items(), *collection.all_files(), *more]
    digest = hashlib.sha256()
    for name, path in files:
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.digest()
