"""What will run: a request with every value decided, once. Local runs, exports, jobs and checks all take this.

`resolve` builds the recipe with NeMo (10 to 20 s for its import). `resolve_cached` gives the same without the built
configuration, but with the file that ranks run, from a cache where nothing that it depends on has changed. Where NeMo
or the data are missing, `deferred.py` leaves the build to the nodes.
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
from superpod.common.files import write_json
from superpod.errors import UserError
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob
from superpod.requests.request import Request
from superpod.runtime.runs import owner

if TYPE_CHECKING:
    import nemo_run as run

    from superpod.planner.rules.rules import Broken


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A request, decided. Overrides, data and size are in every field; nothing is looked up in the recipe again."""

    request: Request
    job: PlannedJob
    """as the planner sees it: model, GPUs, precision, and the layout that runs"""
    plan: dict[str, Any]
    """plan.json: what the planner predicts of the job"""
    nodes: int
    gpus_per_node: int
    max_steps: int
    save_every: int
    """steps between two checkpoints; 0 = none"""
    data_facts: dict[str, Any]
    """what a report shows of the data"""
    lines: list[str]
    """recipe.txt"""
    source: str = field(default="", repr=False)
    """the one Python file that ranks run: `recipe()` returns the partial; "" until it is exported"""
    is_deferred: bool = False
    """resolved without NeMo or without its data (`deferred.py`): the ranks build the request in `source`"""

    @property
    def layout(self) -> Layout:
        """The layout that runs."""
        return self.job.layout

    @property
    def checkpoint_bytes(self) -> int:
        """Of one checkpoint with its optimizer state."""
        return int(self.plan["layouts"][0]["checkpoint_bytes"])

    @property
    def step_time_s(self) -> float | None:
        """As planned; None where the planner has no figure."""
        return self.plan["layouts"][0]["step_time_s"]


@dataclass(frozen=True, kw_only=True)
class BuiltRun(ResolvedRun):
    """A resolved run with its NeMo configuration: what can be trained in this process, or exported."""

    partial: run.Partial = field(compare=False, repr=False)

    def exported(self) -> ResolvedRun:
        """The same as plain data, with its `source` in place of the partial."""
        from superpod.collection.facts import environment
        from superpod.nemo2.export import recipe_source

        heading = f"{self.request.recipe} on {self.nodes} nodes x {self.gpus_per_node} GPUs, as it was submitted."
        values: dict[str, Any] = {known.name: getattr(self, known.name) for known in fields(ResolvedRun)}
        values["source"] = recipe_source.render(
            self.partial, heading, environment.variables(self.job, self.request.overrides)
        )
        return ResolvedRun(**values)


def resolve(request: Request, known: dict[str, Any] | None = None) -> BuiltRun:
    """Build the request's recipe and decide all that follows from it. `known` are facts of its data, if counted before.

    Raises:
        UserError: no such recipe, an override that names nothing or leaves no recipe, an illegal layout, or no NeMo.
    """
    partial, data_facts = build_configuration(request, known)

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
        plan=plans.of_run(job),
        nodes=trainer.num_nodes,
        gpus_per_node=trainer.devices,
        max_steps=trainer.max_steps,
        save_every=partial.log.ckpt.every_n_train_steps or 0,
        data_facts=data_facts,
        lines=[str(line) for line in flatten.flatten(partial)],
        partial=partial,
    )


def plan_job(partial: run.Partial, request: Request) -> PlannedJob:
    """The planner's job of a built configuration: by its recipe's facts, or for any other by what it says itself.

    Raises:
        UserError: a model that the planner does not know, or sizes that contradict each other.
    """
    from superpod.collection.registry import find
    from superpod.nemo2.validation import configured_job
    from superpod.planner import hardware
    from superpod.requests import subject

    if subject.subject_kind(request.recipe) != "recipe":
        return configured_job.of_configuration(partial, subject.select_gpu(partial, request.gpu))
    job = configured_job.of_partial(partial, find(request.recipe))
    if not request.gpu:
        return job
    node = hardware.builtin().node(request.gpu)
    return job.replace(node=node, fabric=hardware.builtin().fabric_of(node))


def job_violations(partial: run.Partial, job: PlannedJob) -> list[Broken]:
    """Every rule of layouts, memory formats and hardware that a configuration breaks as the planner's job."""
    from superpod.nemo2.validation import training
    from superpod.nemo2.validation.reading import Reader
    from superpod.planner import legality

    return [*training.placement(Reader(partial), job.node.gpus, job.node.gpu.name), *legality.violations(job)]


def build_configuration(request: Request, known: dict[str, Any] | None = None) -> tuple[run.Partial, dict[str, Any]]:
    """The recipe with the request's size, data and overrides, in this order, and what is known of the data.

    Raises:
        UserError: no such recipe, an override that names nothing, or no NeMo.
    """
    from superpod.requests import subject

    partial = subject.build(request)
    from superpod.nemo2 import overrides
    from superpod.nemo2.build import schedule  # NeMo-Run: `build` says what to install where it is missing

    data_facts = use_data(partial, request.data, known) if request.data else {}
    overrides.apply(partial, list(request.overrides))
    overrides.keep_one_length(partial, request.overrides)
    if subject.subject_kind(request.recipe) == "recipe":  # a configuration of others is judged as it is
        schedule.fit(partial, request.overrides)
    if request.profile:
        from superpod.requests.profile_request import ProfileRequest

        ProfileRequest.parse(request.profile).add_to(partial)
    return partial, data_facts


def use_data(partial: run.Partial, path: Path, known: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train on the data folder at `path`; returns what a report shows of it: `known`, where that is known already."""
    from superpod.data.folder import DataFolder
    from superpod.nemo2.data_module import data_module

    folder = DataFolder.load(path)
    sizes = {k: getattr(partial.data, k) for k in ("seq_length", "micro_batch_size", "global_batch_size")}
    partial.data = data_module(folder, **sizes)
    # An epoch of few documents, or of a short run, has fewer batches than lie between two validations: Lightning would
    # end the run before its first step.
    partial.trainer.check_val_every_n_epoch = None
    documents = folder.split_documents()
    if not documents["test"]:
        partial.trainer.limit_test_batches = 0
    if not documents["validation"]:
        partial.trainer.limit_val_batches = 0
    return describe_data(path) if known is None else known


def describe_data(path: Path) -> dict[str, Any]:
    """What a report shows of the data folder at `path`. Needs no NeMo; reads every token that is held out."""
    from superpod.data.folder import DataFolder
    from superpod.data.tokens.entropy import unigram_entropy

    folder = DataFolder.load(path)
    return {"unigram_entropy_nats": unigram_entropy(folder)} if folder.split_documents()["validation"] else {}


_PARTS = ("model.config", "data", "trainer.strategy.ddp", "log.ckpt", "resume", "optim.config")
_OURS = ("log.explicit_log_dir", "log.ckpt.dirpath", "resume.resume_from_directory")
_COUNTS = ("trainer.devices", "trainer.num_nodes", "trainer.max_steps")


def require_runnable(partial: run.Partial, overrides: tuple[str, ...]) -> None:
    """Refuse overrides after which nothing can run: a part gone, a count that is none, a path that the run sets."""
    import fiddle as fdl

    _with_callbacks(partial, overrides)
    for path in _PARTS:
        node = partial
        for name in path.split("."):
            node = getattr(node, name, None)
            if node == "megatron" and path.endswith(".ddp") and not any(path in text for text in overrides):
                continue  # NeMo's own recipes of fine-tuning: MegatronStrategy's default
            if not isinstance(node, fdl.Buildable):
                raise UserError(
                    f"the overrides left no whole recipe: {path} must stay a configuration, and {name} is {node!r}"
                )
    if not isinstance(partial.trainer.callbacks, list):
        raise UserError(f"trainer.callbacks must stay a list, not {partial.trainer.callbacks!r}")
    for path in _COUNTS:
        value = getattr(partial.trainer, path.partition(".")[2])
        if type(value) is not int or value < 1:
            raise UserError(f"{path} must be a whole number from 1 on, not {value!r}")
    for text in overrides:
        if text.startswith(_OURS):
            raise UserError(
                f"override {text.partition('=')[0]}: a run keeps these in its run folder", "name it with --runs"
            )


def _with_callbacks(partial: run.Partial, overrides: tuple[str, ...]) -> None:
    """Give a configuration without callbacks a list of none, as NeMo's own recipes of long contexts have it."""
    if partial.trainer.callbacks is None and not any("callbacks" in text for text in overrides):
        partial.trainer.callbacks = []


# -- the cache of resolved runs -------------------------------------------------------------------------------------


def resolve_cached(request: Request) -> ResolvedRun:
    """The request resolved, with its `source` and without its `partial`; from the cache, or built and kept there.

    Raises:
        UserError: as `resolve`.
    """
    from pydantic import TypeAdapter, ValidationError

    path, adapter = cache_folder() / f"{_cache_key(request)}.json", TypeAdapter(ResolvedRun)
    try:
        owner.refuse_writable(path)  # it holds the source of the recipe, and XDG_CACHE_HOME may be a shared folder
        return adapter.validate_json(path.read_bytes())
    except (OSError, ValidationError, UserError):
        pass  # not there, torn, or another user's: build it
    data = adapter.dump_python(resolve(request).exported(), mode="json")
    try:
        with owner.others_cannot_write():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, data)
    except OSError:
        pass  # a home that cannot be written costs time, not the job
    return adapter.validate_python(data)  # as it comes from the cache: JSON has lists where Python has tuples


def is_cached(request: Request) -> bool:
    """Whether `resolve_cached` will not have to import NeMo."""
    return (cache_folder() / f"{_cache_key(request)}.json").is_file()


def cache_folder() -> Path:
    """Where resolved runs are kept: $XDG_CACHE_HOME/superpod/recipes."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "superpod" / "recipes"


SOURCES = (
    "common",
    "planner",
    "collection",
    "included/recipes",
    "data",
    "nemo2",
    "weights",
    "requests",
    "reports",
    "profiles",
)
"""Folders of this package whose code and data decide what a request comes to."""


def _cache_key(request: Request) -> str:
    """Of all that the result depends on: the request, its data, our sources, and the versions of NeMo's stack."""
    from superpod.runtime.runs.versions import versions

    question = json.dumps([request.recipe, request.facts(), versions()], sort_keys=True, default=str)
    data = [("dataset.json", request.data / "dataset.json")] if request.data else []
    return hashlib.sha256(question.encode() + hash_sources(SOURCES, data)).hexdigest()[:32]


def hash_sources(folders: Sequence[str], more: Sequence[tuple[str, Path]] = ()) -> bytes:
    """SHA-256 of this package's code and data in `folders`, of users' collections, and of `more` files by name."""
    files = [*package_files.files([".", *folders]).items(), *collection.all_files(), *more]
    digest = hashlib.sha256()
    for name, path in files:
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.digest()
