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
"""Maximum number of layers of a model. Building a model with a mistyped number could take hours and all memory."""
CHECKPOINT_BYTES = 14
"""Bytes per parameter of a checkpoint: weight 2, main weight 4, two moments 8."""


@dataclass(frozen=True)
class LocalRun:
    """A resolved run for this machine: on its GPUs or, if it has none, a rehearsal on CPUs."""

    resolved: ResolvedRun
    partial: run.Partial
    ranks: int
    facts: dict[str, Any]
    """entries of run.json in addition to those of the request"""
    changes: list[Change] = field(default_factory=list)
    """changes of the recipe for the rehearsal; empty on GPUs"""
    checkpoint_bytes: int = 0
    """size of a checkpoint; 0 = unknown"""

    @property
    def max_steps(self) -> int:
        """The number of steps after which training is done."""
        return self.partial.trainer.max_steps

    @property
    def lines(self) -> list[str]:
        """The lines of recipe.txt: the recipe as it is trained on this machine."""
        from superpod.nemo2.export import flatten

        return [str(line) for line in flatten.flatten(self.partial)]


def prepare(request: Request, change: Callable[[run.Partial], dict[str, object]] | None = None) -> LocalRun:
    """Resolve a request for this machine: for its GPUs or, if it has none, as a rehearsal on CPUs.

    `change` modifies the configuration after the machine is checked, and returns entries of run.json. Raises UserError
    for an override of an unknown field, an illegal layout, too few GPUs, or too little memory.
    """
    proof_level.require_trainable(registry.find(request.recipe))
    require_versions({}, on_gpu=False)
    preflight.require_planned_memory(request)
    resolved_run = resolve(request)

    import torch  # after `resolve`, whose error has the command that installs NeMo

    partial, ranks = resolved_run.partial, resolved_run.nodes * resolved_run.gpus_per_node
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        require_gpus(request.recipe, partial, gpus)
        required = needs.required_versions(registry.find(request.recipe).model, resolved_run.job)
        require_versions({"needs": required}, on_gpu=True)
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
    """Raise UserError for package versions that a rank on Slurm refuses too. Imports none of the packages.

    `facts` is run.json, of which only `needs` is used; `on_gpu` = the versions that matter on GPUs are required too.
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
    """Raise UserError if a configuration needs several nodes or more than `gpus` GPUs; `name` is for the message."""
    size = getattr(partial, "trainer", partial)  # llm.prune creates its own trainer
    nodes, devices = size.num_nodes, size.devices
    if nodes > 1 or devices > gpus:
        raise UserError(
            f"{name} needs {nodes} x {devices} GPUs, but this machine has {gpus}",
            "submit the run to a cluster, or override trainer.devices and the layout",
        )


def require_memory(name: str, partial: run.Partial, ranks: int) -> int:
    """Return the bytes of a checkpoint of a full-size rehearsal. Raises UserError if there is too little memory."""
    parameters = _count_parameters(partial, ranks)
    preflight.require_rehearsal_memory(name, ranks, ranks * (PROCESS_GIB + parameters * TRAINING_BYTES / 2**30))
    strategy = partial.trainer.strategy  # a checkpoint contains the copies of data-parallel ranks once
    shards = strategy.tensor_model_parallel_size * strategy.pipeline_model_parallel_size
    return parameters * shards * CHECKPOINT_BYTES


def _count_parameters(partial: run.Partial, ranks: int) -> int:
    """Return the number of parameters of rank 0, built on the meta device. Raises UserError if this fails."""
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
    """The end of a local attempt."""

    state: State
    exit_code: int
    message: str


def decide_resume(local: LocalRun, folder: RunFolder) -> resume.Resume:
    """Select the checkpoint from which the next attempt resumes. The caller holds the run's lock.

    Raises UserError if no checkpoint is intact, or the selected one cannot be loaded with the layout of the run.
    """
    decision = resume.decide(folder)
    if decision.checkpoint:
        problem = resume_layout.layout_problem(decision.checkpoint, local.partial.trainer.strategy)
        if problem:
            raise UserError(*problem)
    return decision


def launch(local: LocalRun, folder: RunFolder, attempt: Attempt, tick: Callable[..., None]) -> AttemptEnd:
    """Run the ranks of an attempt, wait until they have exited, and return the end of the attempt.

    `tick` is called five times per second, sometimes with a message to print. On the first SIGINT, SIGTERM or SIGHUP,
    the ranks save and exit; on the second, they are killed. They are also killed if they make no progress, or if this
    process is killed.
    """
    with watchdog.run_watchdog(attempt.path):
        return _run_ranks(local, folder, attempt, tick)


def _run_ranks(local: LocalRun, folder: RunFolder, attempt: Attempt, tick: Callable[..., None]) -> AttemptEnd:
    import nemo_run as run
    from torchx.schedulers.local_scheduler import SignalException

    attach(local.partial, folder.path, attempt.path, local.resolved.request.profile)
    values = rank_environment(local.ranks if local.changes else 0) | _run_environment(local) | {MARK: str(attempt.path)}
    values |= capture.flight_recorder(attempt.path, os.environ)
    executor = run.LocalExecutor(
        ntasks_per_node=local.ranks, launcher=_torchrun_launcher(local, folder), env_vars=values
    )
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
        stop.received += 1  # it arrived before the ranks started, while NeMo-Run handled signals
    finally:
        # Data workers and checkpoint writers survive a killed rank.
        send(find(attempt.path), signal.SIGKILL)
    if detector.stalled and not folder.done:
        return AttemptEnd(State.STALLED, 1, detector.stalled)
    return _attempt_end(folder, attempt, stop.received, state)


def _torchrun_launcher(local: LocalRun, folder: RunFolder) -> run.Torchrun:
    """Return NeMo-Run's torchrun launcher. With --profile nsys, it profiles all ranks in one report."""
    import nemo_run as run

    if not local.resolved.request.profile.startswith("nsys"):
        return run.Torchrun()
    target = folder.path / nsys.FOLDER
    target.mkdir(exist_ok=True)
    launcher = run.Torchrun(nsys_profile=True, nsys_folder=str(target), nsys_filename="ranks")
    launcher.nsys_extra_args = [*launcher.nsys_extra_args, "--export=sqlite"]
    return launcher


def rank_environment(cpu_ranks: int) -> dict[str, str]:
    """Return the environment variables of the ranks that differ from those of this process.

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
    """Return the environment variables that a run needs on GPUs. Variables of this shell take precedence.

    Raises UserError if a variable of this shell would make the run fail when it starts.
    """
    if local.changes:  # a rehearsal
        return {}
    job = local.resolved.job
    required_variables = environment.variables(job, local.resolved.request.overrides)
    shell_values = {v.name: os.environ[v.name] for v in required_variables if v.name in os.environ}
    shell_values |= {name: os.environ[name] for name in environment.CHECKED_VARIABLES if name in os.environ}
    variables = environment.with_user_variables(required_variables, shell_values, "set in this shell", job)
    return {variable.name: variable.value for variable in variables}


@contextmanager
def _nemo_run_home(folder: Path) -> Iterator[str]:
    """Store NeMo-Run's experiments and its list of local jobs in `folder` instead of ~/.nemo_run within the block.

    Yields a symbolic link to `folder` whose path needs no quoting: NeMo-Run quotes the arguments of torchrun for a
    shell, but its local scheduler uses none, so that every run would fail with a space in the path.
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
    """Add the folder of this Python's torchrun to PATH, which NeMo-Run searches, within the block."""
    old_path = os.environ.get("PATH", "")
    os.environ["PATH"] = rank_environment(0)["PATH"]
    try:
        yield
    finally:
        os.environ["PATH"] = old_path


def _attempt_end(folder: RunFolder, attempt: Attempt, stops: int, torchx_state: str) -> AttemptEnd:
    """Return the end of an attempt whose ranks have exited; `stops` is the number of stop signals from the user."""
    from superpod.runtime.attempts.diagnose import summarize

    if folder.done:
        return AttemptEnd(State.DONE, 0, "")
    if stops:
        saved_note = ", checkpoint saved" if attempt.heartbeat().get("checkpoint") else ""
        return AttemptEnd(State.CANCELLED, 130, f"stopped by the user{saved_note}")
    if torchx_state.endswith("SUCCEEDED"):
        return AttemptEnd(State.FAILED, 1, "the job ended before its last step")
    return AttemptEnd(State.FAILED, 1, summarize(folder, attempt).cause)
