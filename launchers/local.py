"""Run a recipe on this machine: NeMo-Run's LocalExecutor and torchrun, on its GPUs or as a rehearsal without."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.launchers.rehearsal import dry_build, rehearse
from superpod.launchers.rundir import Link, RunDir
from superpod.planner.errors import UserError

if TYPE_CHECKING:
    import nemo_run as run
    import psutil

GRACE_S = 120
"""How long the ranks may take to save and end after a stop signal, seconds."""

POLL_S = 0.2

MARK = "SUPERPOD_LINK_DIR"
"""In the environment of every process of a link, so that none is left behind."""


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
    def of(cls, folder: RunDir, more: list[str]) -> Job:
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
    """plan.json: the layout that runs; the planner adds what it predicts."""
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
    from superpod.recipes.data.folder import DataFolder
    from superpod.recipes.registry import find

    find(job.recipe).layout(job.num_nodes)
    if job.data:
        DataFolder.load(job.data)


def prepare(job: Job) -> Prepared:
    """Build the job's recipe for this machine: its GPUs, or a CPU rehearsal when it has none.

    Raises:
        UserError: an override that names nothing, an illegal layout, too few GPUs, or too little memory.
    """
    from superpod.recipes import build

    partial = build(job.recipe, job.num_nodes)

    import torch

    from superpod.recipes import from_layout, overrides

    facts = use_data(partial, job.data) if job.data else {}
    overrides.apply(partial, job.overrides)
    ranks = partial.trainer.devices * partial.trainer.num_nodes
    layout = from_layout.read(partial)
    for rule, move in layout.violations(ranks):
        raise UserError(rule, move)
    query = {"recipe": job.recipe, "world": ranks}
    plan = {
        "schema": 1,
        "query": query,
        "candidates": 0,
        "layouts": [{"layout": vars(layout) | {"dp": layout.dp(ranks)}}],
    }
    if torch.cuda.is_available():
        _fits_gpus(job.recipe, partial, torch.cuda.device_count())
        return Prepared(partial, ranks, plan, facts)
    size = _rehearsable(job.recipe, partial, ranks)
    rehearsal, changes = rehearse(partial, devices=ranks)
    return Prepared(rehearsal, ranks, plan, facts, changes, size)


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

    parameters = sum(dry_build(partial, rank=0, world_size=ranks))
    # NeMo itself takes 0.8 GiB a process; a parameter 18 bytes: weight, gradient, main weight, two moments.
    need = ranks * (0.8 + parameters * 18 / 2**30)
    have = psutil.virtual_memory().available / 2**30
    if need > have:
        raise UserError(
            f"this machine has no GPU, and rehearsing {name} on CPUs at its own size takes {ranks} processes and "
            f"{need:,.0f} GiB; {have:.0f} GiB are free",
            "rehearse the mechanics with tiny_llama3, or run this one where its GPUs are",
        )
    strategy = partial.trainer.strategy
    return parameters * strategy.tensor_model_parallel_size * strategy.pipeline_model_parallel_size * 14


def point_at(partial: run.Partial, folder: RunDir, link: Link) -> None:
    """Have the run write where contracts say: checkpoints shared by all links, logs of its own, metrics."""
    import nemo_run as run

    from superpod.launchers.runtime import RunCallback

    partial.log.explicit_log_dir = str(link.path / "nemo")
    partial.log.ckpt.dirpath = str(folder.checkpoints)
    partial.resume.resume_from_directory = str(folder.checkpoints)
    partial.trainer.callbacks = [
        *partial.trainer.callbacks,
        run.Config(RunCallback, run_dir=str(folder.path), link=link.name),
    ]


@dataclass(frozen=True)
class Ended:
    """How a link ended."""

    state: str
    exit_code: int
    message: str


def launch(prepared: Prepared, folder: RunDir, link: Link, tick: Callable[[], None]) -> Ended:
    """Run the prepared job in `link` and wait for it; `tick` is called a few times a second meanwhile.

    A first SIGINT or SIGTERM asks the ranks to save and end, a second one kills them.
    """
    import nemo_run as run
    from torchx.schedulers.local_scheduler import SignalException

    point_at(prepared.partial, folder, link)
    environment = _environment() | {MARK: str(link.path)}
    executor = run.LocalExecutor(ntasks_per_node=prepared.ranks, launcher="torchrun", env_vars=environment)
    stop = _StopSignal()
    home, state = link.path / "nemo_run", ""
    try:
        with _nemo_run_in(home), run.Experiment("run", base_dir=str(home), enable_goodbye_message=False) as exp:
            exp.add(prepared.partial, executor=executor, name="run")
            exp.run()
            with stop.installed():
                _wait(stop, tick)
        state = str(exp.jobs[0].state)
    except (KeyboardInterrupt, SignalException):  # while NeMo-Run had the signals, before there were ranks to ask
        stop.received += 1
    finally:
        _signal(_orphans(link), signal.SIGKILL)
    return _verdict(folder, link, stop.received, state)


def _wait(stop: _StopSignal, tick: Callable[[], None]) -> None:
    """Until no rank and no torchrun of ours is left; passes a stop signal on to the ranks."""
    asked = 0.0
    while children := _children():
        tick()
        if stop.received > 1 or (asked and time.monotonic() - asked > GRACE_S):
            _signal(children, signal.SIGKILL)
        elif stop.received and not asked:
            ranks = [c for c in children if _is_rank(c)]
            _signal(ranks or children, signal.SIGTERM)
            asked = time.monotonic()
        time.sleep(POLL_S)
    tick()


def _children() -> list[psutil.Process]:
    import psutil

    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def _orphans(link: Link) -> list[psutil.Process]:
    """Checkpoint writers and data workers that outlived a killed rank: 0.4 GiB each, waiting for ever."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == str(link.path):
                found.append(process)
        except psutil.Error:
            continue
    return found


def _is_rank(process: psutil.Process) -> bool:
    """Whether torchrun started this process as a rank: not torchrun itself, not a data worker of a rank."""
    import psutil

    try:
        return "RANK" in process.environ() and "RANK" not in process.parent().environ()  # pyright: ignore
    except (psutil.Error, AttributeError):
        return False


def _signal(processes: list[psutil.Process], number: int) -> None:
    import psutil

    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


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
def _nemo_run_in(home: Path) -> Iterator[None]:
    """NeMo-Run keeps its experiments and a list of local jobs under ~/.nemo_run; ours stay in the run folder."""
    from nemo_run.config import set_nemorun_home

    before = os.environ.get("PATH", "")
    home.mkdir(parents=True, exist_ok=True)
    set_nemorun_home(str(home))
    os.environ["PATH"] = _environment()["PATH"]
    try:
        yield
    finally:
        os.environ["PATH"] = before


class _StopSignal:
    """Counts SIGINT and SIGTERM while it is installed, in place of NeMo-Run's handlers, which raise."""

    def __init__(self) -> None:
        self.received = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._count) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _count(self, number: int, frame: object) -> None:
        self.received += 1


def _verdict(folder: RunDir, link: Link, stops: int, torchx_state: str) -> Ended:
    from superpod.launchers.diagnose import why

    if folder.done:
        return Ended("done", 0, "")
    if stops:
        return Ended("cancelled", 130, "stopped by the user")
    if torchx_state.endswith("SUCCEEDED"):
        return Ended("failed", 1, "the job ended before its last step")
    return Ended("failed", 1, why(folder, link))
