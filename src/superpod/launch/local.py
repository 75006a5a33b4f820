"""Run a recipe on this machine with NeMo-Run's LocalExecutor and torchrun: on GPUs, or as a rehearsal on CPUs."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.collection import registry
from superpod.collection.facts import environment, needs, proof_level
from superpod.common import cpu_threads
from superpod.errors import UserError
from superpod.launch import preflight
from superpod.launch.hang_detector import HangDetector
from superpod.launch.preflight import PROCESS_GIB, TRAINING_BYTES
from superpod.rehearsal import Change, dry_build, rehearse
from superpod.requests.request import Request
from superpod.requests.resolve import ResolvedRun, resolve
from superpod.runtime.checkpoints import resume, resume_layout
from superpod.runtime.processes import watchdog
from superpod.runtime.processes.attempt_processes import MARK, find, send
from superpod.runtime.processes.local_ranks import GRACE_S, StopSignal, wait_for_all
from superpod.runtime.rank import capture, nsys
from superpod.runtime.rank.rank import attach
from superpod.runtime.runs import versions
from superpod.runtime.runs.run_folder import Attempt, RunFolder
from superpod.runtime.runs.run_state import State

if TYPE_CHECKING:
    import nemo_run as run


MAX_LAYERS = 2000
"""Models with more layers are refused before they are built: a typo could take hours and all memory."""
CHECKPOINT_BYTES = 14
"""Bytes per parameter in a checkpoint: weight 2, main weight 4, two moments 8."""


@dataclass(frozen=True)
class LocalRun:
    """A resolved run for this machine: on its GPUs or, if it has none, as a rehearsal on CPUs."""

    resolved: ResolvedRun
    partial: run.Partial
    ranks: int
    facts: dict[str, Any]
    """entries of run.json besides the request"""
    changes: list[Change] = field(default_factory=list)
    """changes for the rehearsal; empty on a GPU"""
    checkpoint_bytes: int = 0

    @property
    def max_steps(self) -> int:
        """The number of steps after which training is done."""
        return self.partial.trainer.max_steps

    @property
    def lines(self) -> list[str]:
        """Contents of recipe.txt: the recipe as it runs on this machine."""
        from superpod.nemo2.export import flatten

        return [str(line) for line in flatten.flatten(self.partial)]


def prepare(request: Request, change: Callable[[run.Partial], dict[str, object]] | None = None) -> LocalRun:
    """Resolve the request for this machine: for its GPUs or, if it has none, as a rehearsal on CPUs.

    Args:
        request: the recipe and its changes.
        change: function that modifies the configuration after the checks of the machine, and returns entries of
            run.json.

    Raises:
        UserError: an override of an unknown field, an illegal layout, too few GPUs, or too little memory.
    """
    proof_level.require_trainable(registry.find(request.recipe))
    require_versions({}, on_gpu=False)
    preflight.require_planned_memory(request)
    resolved_run = resolve(request)

    import torch  # after `resolve`, whose error says how to install NeMo

    partial, ranks = resolved_run.partial, resolved_run.nodes * resolved_run.gpus_per_node
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        require_gpus(request.recipe, partial, gpus)
        require_versions(
            {"needs": needs.required_versions(registry.find(request.recipe).model, resolved_run.job)}, on_gpu=True
        )
    checkpoint_bytes = 0 if gpus else require_memory(request.recipe, partial, ranks)
    facts = resolved_run.data_facts
    if change:
        facts = facts | change(partial)
    if gpus:
        local = LocalRun(resolved_run, partial, ranks, facts)
        _run_environment(local)  # refuses conflicting variables of this shell before the run folder is created
        return local
    rehearsal, changes = rehearse(partial, devices=ranks)
    return LocalRun(resolved_run, rehearsal, ranks, facts | {"rehearsal": True}, changes, checkpoint_bytes)


def require_versions(facts: dict[str, Any], *, on_gpu: bool) -> None:
    """Refuse the versions that a rank on Slurm also refuses when it starts. Imports none of the packages.

    Raises:
        UserError: a version is refused; with each package, its version and the required version.
    """
    hint = "`recipes doctor` lists the versions that work together"
    version = versions.installed_versions(need.package for need in versions.requirements_of(facts))
    if not on_gpu:
        version.pop("cuda", None)
    reason = versions.refusal(version, facts, os.environ, hint)
    if reason:
        problem, _, next_step = reason.partition("\nnext: ")
        raise UserError(problem, next_step or hint)


def require_gpus(name: str, partial: run.Partial, gpus: int) -> None:
    """Refuse a configuration that needs more GPUs than this machine has. Raises UserError."""
    size = getattr(partial, "trainer", partial)  # llm.prune creates its own trainer
    nodes, devices = size.num_nodes, size.devices
    if nodes > 1 or devices > gpus:
        raise UserError(
            f"{name} needs {nodes} x {devices} GPUs, but this machine has {gpus}",
            "submit the run to a cluster, or override trainer.devices and the layout",
        )


def require_memory(name: str, partial: run.Partial, ranks: int) -> int:
    """Refuse a rehearsal that needs more memory than is free; return the bytes of one checkpoint."""
    import psutil

    parameters = _count_parameters(partial, ranks)
    need = ranks * (PROCESS_GIB + parameters * TRAINING_BYTES / 2**30)
    available_gib = psutil.virtual_memory().available / 2**30
    if need > available_gib:
        raise UserError(
            f"this machine has no GPU, and a full-size rehearsal of {name} on CPUs needs {ranks} processes "
            f"and {need:,.0f} GiB, but only {available_gib:.0f} GiB are free",
            f"`recipes rehearse {name}` shrinks it to fit this machine; or run it on a machine with these GPUs",
        )
    strategy = partial.trainer.strategy  # a checkpoint contains the copies of data-parallel ranks once
    shards = strategy.tensor_model_parallel_size * strategy.pipeline_model_parallel_size
    return parameters * shards * CHECKPOINT_BYTES


def _count_parameters(partial: run.Partial, ranks: int) -> int:
    """Count the parameters of rank 0, with the model on the meta device. Raises UserError if it cannot be built."""
    layers = partial.model.config.num_layers or 0
    if layers > MAX_LAYERS:
        raise UserError(f"model.config.num_layers must be at most {MAX_LAYERS}, not {layers}", "correct the override")
    try:
        return sum(dry_build(partial, rank=0, world_size=ranks))
    except UserError:
        raise
    except (AssertionError, ValueError, TypeError, AttributeError, ZeroDivisionError, RuntimeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"Megatron cannot build this model: {lines[0]}", "check the overrides of model.config"
        ) from error


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ended."""

    state: State
    exit_code: int
    message: str


def decide_resume(local: LocalRun, folder: RunFolder) -> resume.Resume:
    """Decide which checkpoint the next attempt resumes from. The caller holds the run's lock.

    Raises:
        UserError: no checkpoint is intact, or the latest cannot be loaded with the layout of the run.
    """
    decision = resume.decide(folder)
    if decision.checkpoint:
        problem = resume_layout.layout_problem(decision.checkpoint, local.partial.trainer.strategy)
        if problem:
            raise UserError(*problem)
    return decision


def launch(local: LocalRun, folder: RunFolder, attempt: Attempt, tick: Callable[..., None]) -> AttemptEnd:
    """Run `local` in `attempt`, wait until it ends, and return how it ended.

    `tick` is called a few times per second, sometimes with a message to print. On the first SIGINT, SIGTERM or SIGHUP,
    the ranks save and exit; on the second, they are killed. Ranks are also killed if they make no progress, or if
    this process is killed.
    """
    with watchdog.run_watchdog(attempt.path):
        return _launch(local, folder, attempt, tick)


def _launch(local: LocalRun, folder: RunFolder, attempt: Attempt, tick: Callable[..., None]) -> AttemptEnd:
    import nemo_run as run
    from torchx.schedulers.local_scheduler import SignalException

    attach(local.partial, folder.path, attempt.path, local.resolved.request.profile)
    values = rank_environment(local.ranks if local.changes else 0) | _run_environment(local) | {MARK: str(attempt.path)}
    values |= capture.flight_recorder(attempt.path, os.environ)
    executor = run.LocalExecutor(ntasks_per_node=local.ranks, launcher=_launcher(local, folder), env_vars=values)
    stop, detector = StopSignal(), HangDetector(attempt)
    state = ""
    try:
        with (
            _nemo_run_home(attempt.path / "nemo_run") as home,
            run.Experiment("run", base_dir=home, enable_goodbye_message=False) as exp,
        ):
            exp.add(local.partial, executor=executor, name="run")
            exp.run()
            with stop.handle_signals():
                wait_for_all(stop, detector.add_check(tick))
        state = str(exp.jobs[0].state)
    except (KeyboardInterrupt, SignalException):
        stop.received += 1  # the signal arrived before the ranks started, while NeMo-Run handled signals
    finally:
        # Data workers and checkpoint writers survive a killed rank.
        send(find(attempt.path), signal.SIGKILL)
    if detector.stalled and not folder.done:
        return AttemptEnd(State.STALLED, 1, detector.stalled)
    return _attempt_end(folder, attempt, stop.received, state)


def _launcher(local: LocalRun, folder: RunFolder) -> run.Torchrun:
    """Return NeMo-Run's torchrun launcher; with --profile nsys, it profiles all ranks of this machine in one report."""
    import nemo_run as run

    if not local.resolved.request.profile.startswith("nsys"):
        return run.Torchrun()
    target = folder.path / nsys.FOLDER
    target.mkdir(exist_ok=True)
    launcher = run.Torchrun(nsys_profile=True, nsys_folder=str(target), nsys_filename="ranks")
    launcher.nsys_extra_args = [*launcher.nsys_extra_args, "--export=sqlite"]
    return launcher


def rank_environment(cpu_ranks: int) -> dict[str, str]:
    """Return the environment variables that ranks need in addition to the inherited ones.

    `cpu_ranks` is the number of ranks of a rehearsal; 0 on GPUs.
    """
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    variables = {
        # The virtual environment's torchrun, even if its bin folder is not on the PATH.
        "PATH": os.pathsep.join(dict.fromkeys([str(Path(sys.executable).parent), *folders])),
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        # torchrun kills the ranks this long after a signal; a checkpoint may take longer than its default of 30 s.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE_S),
    }
    if cpu_ranks:
        variables |= cpu_threads.environment(cpu_ranks)
    return variables


def _run_environment(local: LocalRun) -> dict[str, str]:
    """Return the environment variables that the run needs on GPUs; variables of this shell take precedence.

    Raises:
        UserError: a variable of this shell would make the run fail when it starts.
    """
    if local.changes:  # a rehearsal
        return {}
    job = local.resolved.job
    required_variables = environment.variables(job, local.resolved.request.overrides)
    shell_values = {v.name: os.environ[v.name] for v in required_variables if v.name in os.environ}
    shell_values |= {name: os.environ[name] for name in environment.CHECKED_VARIABLES if name in os.environ}
    return {
        v.name: v.value
        for v in environment.with_user_variables(required_variables, shell_values, "set in this shell", job)
    }


@contextmanager
def _nemo_run_home(folder: Path) -> Iterator[str]:
    """Keep NeMo-Run's experiments and its list of local jobs in `folder` instead of ~/.nemo_run.

    Yields a symbolic link to `folder` whose path needs no quoting: NeMo-Run quotes the arguments of torchrun for a
    shell, but its local scheduler does not use a shell, so with a space in the path, every run would fail.
    """
    from nemo_run.config import set_nemorun_home

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="recipes-") as scratch:
        if shlex.quote(scratch) != scratch:
            raise UserError(
                f"the path of the folder for temporary files, {scratch}, contains special characters",
                "set TMPDIR to a path without spaces or special characters",
            )
        home = os.path.join(scratch, "nemo_run")
        os.symlink(folder, home)
        set_nemorun_home(home)
        with add_torchrun_to_path():
            yield home


@contextmanager
def add_torchrun_to_path() -> Iterator[None]:
    """Put the torchrun of this Python on the PATH of this process, which NeMo-Run searches, within the block."""
    old_path = os.environ.get("PATH", "")
    os.environ["PATH"] = rank_environment(0)["PATH"]
    try:
        yield
    finally:
        os.environ["PATH"] = old_path


def _attempt_end(folder: RunFolder, attempt: Attempt, stops: int, torchx_state: str) -> AttemptEnd:
    from superpod.runtime.attempts.diagnose import summarize

    if folder.done:
        return AttemptEnd(State.DONE, 0, "")
    if stops:
        saved_step = attempt.heartbeat().get("checkpoint")
        message = "stopped by the user"
        if saved_step:
            message += ", checkpoint saved"
        return AttemptEnd(State.CANCELLED, 130, message)
    if torchx_state.endswith("SUCCEEDED"):
        return AttemptEnd(State.FAILED, 1, "the job ended before its last step")
    return AttemptEnd(State.FAILED, 1, summarize(folder, attempt).cause)
