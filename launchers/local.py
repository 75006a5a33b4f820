"""Run a recipe on this machine: NeMo-Run's LocalExecutor and torchrun, on its GPUs or as a rehearsal without."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError
from superpod.launchers.watchdog import Watchdog
from superpod.node.processes import GRACE_S, MARK, StopSignal, processes_of, send, wait_for_all
from superpod.node.rank import attach
from superpod.node.run_folder import Attempt, RunFolder
from superpod.rehearsal import dry_build, rehearse

if TYPE_CHECKING:
    import nemo_run as run


MOST_LAYERS = 2000


@dataclass
class Job:
    """What is to be run: a recipe, what is changed in it, and where it runs."""

    recipe: str
    overrides: list[str] = field(default_factory=list)
    data: Path | None = None
    num_nodes: int | None = None

    def facts(self) -> dict[str, Any]:
        """As run.json keeps it."""
        return {"overrides": self.overrides, "data": str(self.data) if self.data else None, "num_nodes": self.num_nodes}

    @classmethod
    def of(cls, folder: RunFolder, more: list[str]) -> Job:
        """The job of an earlier run, with `more` overrides after its own."""
        facts = folder.facts
        data = Path(facts["data"]) if facts.get("data") else None
        return cls(folder.recipe, facts.get("overrides", []) + more, data, facts.get("num_nodes"))


@dataclass(frozen=True)
class Prepared:
    """A job as it will run on this machine."""

    partial: run.Partial
    ranks: int
    plan: dict[str, Any]
    """plan.json: the layout that runs, and what the planner predicts of it on the recipe's GPUs."""
    facts: dict[str, Any]
    """What a report wants to know of the data."""
    rehearsed: list[Any] = field(default_factory=list)
    """What the rehearsal changed (`rehearsal.Change`); empty on a GPU."""
    checkpoint_bytes: int = 0

    @property
    def max_steps(self) -> int:
        """The step at which the training is done."""
        return self.partial.trainer.max_steps


def check(job: Job) -> None:
    """Refuse what can be refused before NeMo is imported.

    Raises:
        UserError: no such recipe or size, or a data folder that is not complete.
    """
    from superpod.node.redaction import redact_text
    from superpod.recipes.data.folder import DataFolder
    from superpod.recipes.registry import find

    find(job.recipe).layout(job.num_nodes)
    for text in job.overrides:
        if not re.match(r"[A-Za-z_][\w.\[\]]*\W*=", text):
            raise UserError(f"{text!r} is not an override", "write path=value, such as trainer.max_steps=10")
        if redact_text(text) != text:
            path = text.partition("=")[0]
            raise UserError(
                f"override {path} looks like a secret, and run folders keep overrides", "use the environment"
            )
    if job.data:
        DataFolder.load(job.data)


def prepare(job: Job, change: Callable[[run.Partial], dict[str, Any]] | None = None) -> Prepared:
    """Build the job's recipe for this machine: its GPUs, or a CPU rehearsal when it has none.

    `change` is called last, with the recipe that this machine can run, and returns more facts.

    Raises:
        UserError: an override that names nothing, an illegal layout, too few GPUs, or too little memory.
    """
    from superpod.recipes import build

    partial = build(job.recipe, job.num_nodes)

    import torch

    from superpod.planner import legality, plans
    from superpod.recipes import overrides
    from superpod.recipes.planned_job import of_partial
    from superpod.recipes.registry import find

    facts = use_data(partial, job.data) if job.data else {}
    overrides.apply(partial, job.overrides)
    still_a_recipe(partial, job.overrides)
    ranks = partial.trainer.devices * partial.trainer.num_nodes
    planned = of_partial(partial, find(job.recipe))
    legality.require(planned)
    plan = plans.of_run(planned)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        _fits_gpus(job.recipe, partial, gpus)
    size = 0 if gpus else _rehearsable(job.recipe, partial, ranks)
    facts |= change(partial) if change else {}
    if gpus:
        return Prepared(partial, ranks, plan, facts)
    rehearsal, changes = rehearse(partial, devices=ranks)
    return Prepared(rehearsal, ranks, plan, facts | {"rehearsal": True}, changes, size)


def use_data(partial: run.Partial, path: Path) -> dict[str, Any]:
    """Train on the data folder at `path`; returns what a report wants to know of it."""
    from superpod.recipes.data.entropy import unigram_entropy
    from superpod.recipes.data.folder import DataFolder
    from superpod.recipes.data.module import data_module

    folder = DataFolder.load(path)
    sizes = {k: getattr(partial.data, k) for k in ("seq_length", "micro_batch_size", "global_batch_size")}
    partial.data = data_module(folder, **sizes)
    documents = folder.split_documents()
    if not documents["test"]:
        partial.trainer.limit_test_batches = 0
    if not documents["validation"]:
        partial.trainer.limit_val_batches = 0
        return {}
    return {"unigram_entropy_nats": unigram_entropy(folder)}


_PARTS = ("model.config", "data", "trainer.strategy.ddp", "log.ckpt", "resume", "optim.config")
_OURS = ("log.explicit_log_dir", "log.ckpt.dirpath", "resume.resume_from_directory")
_COUNTS = ("trainer.devices", "trainer.num_nodes", "trainer.max_steps")


def still_a_recipe(partial: run.Partial, overrides: list[str]) -> None:
    """Refuse overrides after which there is nothing to run: a part gone, a count that is none, a path that is ours."""
    import fiddle as fdl

    for path in _PARTS:
        node = partial
        for name in path.split("."):
            node = getattr(node, name, None)
            if not isinstance(node, fdl.Buildable):
                raise UserError(f"{path} must stay a configuration; the overrides made {name} {node!r}")
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


def _fits_gpus(name: str, partial: run.Partial, gpus: int) -> None:
    nodes, devices = partial.trainer.num_nodes, partial.trainer.devices
    if nodes > 1 or devices > gpus:
        raise UserError(
            f"{name} runs on {nodes} x {devices} GPUs, and this machine has {gpus}",
            "submit it to a cluster, or override trainer.devices and the layout",
        )


def _rehearsable(name: str, partial: run.Partial, ranks: int) -> int:
    """Refuse a rehearsal that this machine's memory does not hold; returns the bytes of one checkpoint."""
    import psutil

    parameters = _parameters(partial, ranks)
    # NeMo itself takes 0.8 GiB a process; a parameter 18 bytes: weight, gradient, main weight, two moments.
    need = ranks * (0.8 + parameters * 18 / 2**30)
    have = psutil.virtual_memory().available / 2**30
    if need > have:
        raise UserError(
            f"this machine has no GPU, and rehearsing {name} on CPUs at its own size takes {ranks} processes and "
            f"{need:,.0f} GiB; {have:.0f} GiB are free",
            f"`recipes rehearse {name}` shrinks it to what this machine holds; or run it where its GPUs are",
        )
    strategy = partial.trainer.strategy
    return parameters * strategy.tensor_model_parallel_size * strategy.pipeline_model_parallel_size * 14


def _parameters(partial: run.Partial, ranks: int) -> int:
    """Parameters of rank 0, from the real model on the meta device; what Megatron asserts is the user's mistake."""
    if (partial.model.config.num_layers or 0) > MOST_LAYERS:
        raise UserError(f"model.config.num_layers {partial.model.config.num_layers} is more than any model has")
    try:
        return sum(dry_build(partial, rank=0, world_size=ranks))
    except UserError:
        raise
    except (AssertionError, ValueError, TypeError, AttributeError, ZeroDivisionError, RuntimeError) as refused:
        words = str(refused).strip().splitlines() or [type(refused).__name__]
        raise UserError(
            f"Megatron cannot build this model: {words[0]}", "look at the overrides of model.config"
        ) from refused


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ended."""

    state: str
    exit_code: int
    message: str


def launch(prepared: Prepared, folder: RunFolder, attempt: Attempt, tick: Callable[..., None]) -> AttemptEnd:
    """Run the prepared job in `attempt` and wait for it.

    `tick` is called a few times a second, with words to say or none.

    A first SIGINT or SIGTERM asks the ranks to save and end, a second one kills them. Ranks that make no steps any more
    are ended too.
    """
    import nemo_run as run
    from torchx.schedulers.local_scheduler import SignalException

    attach(prepared.partial, folder.path, attempt.path)
    environment = _environment() | {MARK: str(attempt.path)}
    executor = run.LocalExecutor(ntasks_per_node=prepared.ranks, launcher="torchrun", env_vars=environment)
    stop, watchdog = StopSignal(), Watchdog(attempt)
    state = ""
    try:
        with (
            _nemo_run_in(attempt.path / "nemo_run") as home,
            run.Experiment("run", base_dir=home, enable_goodbye_message=False) as exp,
        ):
            exp.add(prepared.partial, executor=executor, name="run")
            exp.run()
            with stop.installed():
                wait_for_all(stop, watchdog.beside(tick))
        state = str(exp.jobs[0].state)
    except (KeyboardInterrupt, SignalException):  # while NeMo-Run had the signals, before there were ranks to ask
        stop.received += 1
    finally:
        send(processes_of(attempt.path), signal.SIGKILL)
    if watchdog.stalled and not folder.done:
        return AttemptEnd("stalled", 1, watchdog.stalled)
    return _verdict(folder, attempt, stop.received, state)


def _environment() -> dict[str, str]:
    """What the ranks need beyond what they inherit."""
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return {
        # The virtual environment's torchrun, also when its bin folder is not on the PATH.
        "PATH": os.pathsep.join(dict.fromkeys([str(Path(sys.executable).parent), *path])),
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        # torchrun kills its ranks this long after a signal; a checkpoint may take longer than its 30 s.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE_S),
    }


@contextmanager
def _nemo_run_in(folder: Path) -> Iterator[str]:
    """NeMo-Run keeps its experiments and a list of local jobs under ~/.nemo_run; ours stay in the run folder.

    Yields a link to that folder whose path needs no quoting: NeMo-Run quotes torchrun's arguments for a shell, and its
    local scheduler uses none, so that a space in them would end every run.
    """
    from nemo_run.config import set_nemorun_home

    before = os.environ.get("PATH", "")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="recipes-") as scratch:
        if shlex.quote(scratch) != scratch:
            raise UserError(f"the folder for temporary files, {scratch}, needs quoting", "set TMPDIR to a plain path")
        home = os.path.join(scratch, "nemo_run")
        os.symlink(folder, home)
        set_nemorun_home(home)
        os.environ["PATH"] = _environment()["PATH"]
        try:
            yield home
        finally:
            os.environ["PATH"] = before


def _verdict(folder: RunFolder, attempt: Attempt, stops: int, torchx_state: str) -> AttemptEnd:
    from superpod.node.diagnose import why

    if folder.done:
        return AttemptEnd("done", 0, "")
    if stops:
        saved = attempt.heartbeat().get("checkpoint")
        return AttemptEnd("cancelled", 130, "stopped by the user, checkpoint saved" if saved else "stopped by the user")
    if torchx_state.endswith("SUCCEEDED"):
        return AttemptEnd("failed", 1, "the job ended before its last step")
    return AttemptEnd("failed", 1, why(folder, attempt))
