"""Run one attempt inside a Slurm job: start the ranks, monitor them, and record how the attempt ended.

Runs on the first node of the job with Python 3.9: `python3 attempt.py --recipe NAME ... -- srun ...`. The batch script
starts it with `exec`, so that it receives Slurm's signals.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

if sys.version_info < (3, 9):  # noqa: UP036 - a node may have any Python
    sys.exit(f"attempt.py needs Python 3.9 or later, but this is {sys.version.split()[0]}: set software.host_python")
if __name__ == "__main__":  # import from the unpacked files of the batch script
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from superpod.diagnosis import job_end
from superpod.errors import UserError
from superpod.runtime.attempts import (
    attempt_arguments,
    attempt_end,
    deferred_data,
    full_disk,
    guard,
    job_code,
    model_steps,
    next_attempt,
)
from superpod.runtime.attempts.time_limit import TimeLimit
from superpod.runtime.checkpoints import resume, shared_reading
from superpod.runtime.health import node_checks
from superpod.runtime.heartbeat import heartbeat, stall
from superpod.runtime.processes.attempt_processes import MARK
from superpod.runtime.processes.command import output_of
from superpod.runtime.processes.stray_processes import ENDED, StrayProcesses
from superpod.runtime.rank import capture, stacks
from superpod.runtime.runs import owner, run_state
from superpod.runtime.runs.run_folder import RunFolder, as_user_errors
from superpod.runtime.runs.run_state import State

POLL_S = 1.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
CANCELLATION_POLL_S = 10.0
"""Seconds between two queries, after a SIGTERM, of whether the job was cancelled. Slurm's default KillWait is 30 s."""

ERRORS_OF_ALL_JOBS = (resume.NoIntactCheckpointError, deferred_data.MissingDataError, owner.UnsafeError)
"""Errors that would recur in every later job, and therefore stop the run."""
SIGNAL_MEANINGS = {
    "SIGUSR1": "the time limit is near",
    "SIGTERM": "Slurm is ending the job (preempted, requeued or cancelled)",
}


def main(words: list[str]) -> int:
    """Run one attempt with the command line `words`; return the exit code of the job.

    0 = the run is done, the attempt has saved and will be resumed, or there is nothing to do; 1 = the attempt failed.
    """
    options, command = attempt_arguments.parse(words)
    try:
        return _run_job(SlurmJob(), options, command)
    finally:
        if options.unpacked:
            shutil.rmtree(options.unpacked, ignore_errors=True)


def _run_job(job: SlurmJob, options: argparse.Namespace, command: list[str]) -> int:
    try:
        run = open_run(options, job)
        reason = guard.reason_to_skip(
            run,
            lambda ended: job_end.final_state(ended, run.output(ended)),
            job.id,
            has_pending_export=bool(options.model_step) and run.has_pending_export,
        )
        if reason:
            _log(reason)
            return 0
        try:
            return _run_attempt(run, job, options, command)
        finally:
            problem = options.webhook.report_end(
                run, job.id, lambda: bool(next_attempt.pending_jobs()) or job_end.controller_state(job.id) == "PENDING"
            )
            if problem:
                _log(f"notify: {problem}")
    except UserError as error:
        _log(_with_hint(error))
        return 1


def _run_attempt(run: RunFolder, job: SlurmJob, options: argparse.Namespace, command: list[str]) -> int:
    try:
        # Before an attempt is opened, which would count as failed on a full disk.
        shortage = _wait_for_space(run, job, options.self_submit)
    except _SignalledError:
        return _handle_signal_while_waiting(run, job)
    if shortage:
        _log(shortage.message)
        return 0 if shortage.next_job_s else 1
    strays = StrayProcesses(run, job.nodes, job.id, _log)
    with strays.take_over_run():
        reason = guard.reason_to_stop(run, options.idle_attempts, options.failures)
        if reason:
            guard.stop(run, reason, by=run_state.StoppedBy.AUTOMATIC)
            _log(reason)
            return 1
        if options.unpacked:
            with as_user_errors(run.path):
                command = job_code.insert_folder(command, job_code.move_to_run(Path(options.unpacked), run.path))
                os.chdir(run.path)  # `python -m` imports from the current folder, which may be any folder
        return _RunningAttempt(run, job, options, strays).execute(command)


class SlurmJob:
    """The Slurm job of this process."""

    def __init__(self) -> None:
        self.id = os.environ.get("SLURM_JOB_ID", "")
        self.restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0") or 0)
        node_list = os.environ.get("SLURM_JOB_NODELIST", "")
        self.nodes = job_end.slurm_output("scontrol", "show", "hostnames", node_list).split()

    def is_preempted(self) -> bool:
        """Return whether this job is being preempted. During the grace time, Slurm signals only the job's steps."""
        return job_end.job_field(self.id, "PreemptTime")[:1].isdigit()

    def run_before_requeue(self, runs: Path) -> str:
        """Return the path of the run in the folder `runs` that this job started before Slurm requeued it; '' if none.

        The path is stored in the job name (`rename_after_run`), since the job id is not unique: another cluster that
        shares the file system, or a new Slurm database, may use the same ids. Raises UserError if the controller does
        not respond, since a new run would then start at step 1.
        """
        if not self.restarts:
            return ""
        name = job_end.job_field(self.id, "JobName")
        if not name:
            raise UserError(
                f"job {self.id} was requeued, but Slurm's controller does not report which run it started",
                "resume the run with `sbatch --export=ALL,SUPERPOD_RUN_DIR=RUN job.sbatch`",
            )
        folder, _, run = name.rpartition(".")
        path = runs / folder / run
        if not folder or not (path / "run.json").is_file():
            return ""  # requeued before it started a run
        os.environ["SLURM_JOB_NAME"] = name
        return str(path)

    def rename_after_run(self, run: RunFolder) -> None:
        """Set the name of this Slurm job to RECIPE.RUN_ID, like `recipes submit`."""
        name = f"{run.path.parent.name}.{run.path.name}"
        if output_of(["scontrol", "update", f"JobId={self.id}", f"JobName={name}"], job_end.TIMEOUT_S) is None:
            _log(f"job {self.id} could not be renamed after {run.path}: if Slurm requeues it, it will start a new run")
        else:
            os.environ["SLURM_JOB_NAME"] = name

    def deadline(self) -> float:
        """Return the Unix time at which the time limit of the job expires; 0 = no limit."""
        with contextlib.suppress(ValueError):
            return time.mktime(time.strptime(job_end.job_field(self.id, "EndTime"), "%Y-%m-%dT%H:%M:%S"))
        return 0.0

    def free_port(self) -> int:
        """Return a free TCP port on this node, below Linux's ephemeral ports (32768 and up).

        Raises UserError if none of the 2000 ports that were tried is free.
        """
        for step in range(2000):
            port = 20000 + (int(self.id or 0) * 7 + step) % 10000  # the searches of two jobs begin far apart
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("", port))
                return port
        raise UserError("no free TCP port was found between 20000 and 30000 on this node")


def open_run(options: argparse.Namespace, job: SlurmJob) -> RunFolder:
    """Open the run of this job: the one in SUPERPOD_RUN_DIR, the one that it started before a requeue, or a new one.

    Raises UserError if the run does not exist, another user could have written into it, or Slurm does not respond.
    """
    path = os.environ.get("SUPERPOD_RUN_DIR") or job.run_before_requeue(Path(options.runs))
    if path:
        owner.refuse_unsafe(Path(path))
        run = RunFolder.open(path)
        model_steps.refuse_unsafe_inputs(run)
        return run
    lines = Path(options.lines).read_text(encoding="utf-8").splitlines() if options.lines else []
    run = RunFolder.create(Path(options.runs), options.recipe, facts=json.loads(options.facts), recipe_lines=lines)
    job.rename_after_run(run)
    return run


class _SignalledError(BaseException):
    """A stop signal arrived before the ranks were started. Derived from BaseException, so that no `except` hides it."""


class _RunningAttempt:
    """An attempt, from the creation of its folder to the final result.json."""

    def __init__(self, run: RunFolder, job: SlurmJob, options: argparse.Namespace, strays: StrayProcesses) -> None:
        self.run, self.job, self.options, self.strays = run, job, options, strays
        self.pause = functools.partial(time.sleep, options.second_look_s)
        self.attempt = run.new_attempt(job=job.id)
        self.attempt.mark(
            State.RUNNING, job=job.id, restarts=job.restarts, nodes=job.nodes, before=guard.newest_step(run)
        )
        self.signals: list[str] = []
        """names of the stop signals received by this process or a rank"""
        self.stalled, self.cancelled = "", False
        self.oom_kills = attempt_end.oom_kills()
        self._next_check = 0.0
        """time.monotonic() at which to check again whether the job was cancelled"""
        self.step = int(bool(options.checks))
        """id of the job step that runs the ranks; earlier steps prepare the attempt"""
        self._is_preparing = True

    def execute(self, command: list[str]) -> int:
        """Prepare the attempt, run the ranks with `command`, and record the end; return the exit code of the job.

        Raises UserError if the ranks are not started because of stray processes, the data, the model or the
        checkpoints.
        """
        try:
            for number in STOP_SIGNALS:
                signal.signal(number, self._record_signal)
            # Before the checkpoints are read: a stray process of a killed attempt may still be writing one.
            self.strays.kill_earlier()
            self.step += self.strays.steps
            reason = self._exclude_bad_nodes()
            if not reason and self.run.done:  # only its export is pending
                self._is_preparing = False
                return self._record(0)
            if not reason:
                deferred_data.require(self.run, self.pause)
                self._choose_checkpoint()
                self._import_model()
            self._is_preparing = False
        except _SignalledError:
            return self._record(None)
        except Exception as error:
            self._is_preparing = False
            message = _with_hint(error)
            if isinstance(error, ERRORS_OF_ALL_JOBS):
                guard.stop(self.run, message, by=run_state.StoppedBy.AUTOMATIC)
            with contextlib.suppress(UserError):
                self.attempt.finish(State.FAILED, message=message or type(error).__name__)
            raise
        if reason:
            _log(reason)
            self.attempt.finish(State.REQUEUED, message=reason, counts=False)
            return 1
        return self._run_ranks(command)

    def _exclude_bad_nodes(self) -> str:
        """Exclude nodes that fail the cluster profile's checks from the next attempt; return a message, '' if none."""
        if not self.options.checks:
            return ""
        script = Path(job_code.path_for_nodes("slurm/checks/node.sh"))
        bad = node_checks.bad_nodes(script, self.options.checks, self.job.nodes)
        if not bad:
            return ""
        node_checks.exclude_nodes(self.run, bad, next_attempt.pending_jobs())
        reasons = [*(f"{node}: {why}" for node, why in bad.items()), self._submit_next()]
        return f"bad nodes, excluded from the next attempt: {'; '.join(filter(None, reasons))}"

    def _choose_checkpoint(self) -> None:
        ends = self.job.deadline() or float("inf")
        nodes, folder = self.job.nodes, self.attempt.path
        reader = shared_reading.SharedReader(
            nodes, folder, fully=self.options.verify, left_s=lambda: ends - time.time(), log=_log
        )
        decision = resume.decide(self.run, reader, self.pause)
        if decision.checkpoint:
            owner.refuse_unsafe_checkpoint(decision.checkpoint)
        resume.apply_decision(self.run, self.attempt, decision)
        _log(decision.message)
        self.attempt.mark(State.RUNNING, before=guard.newest_step(self.run))
        self.step += reader.steps

    def _import_model(self) -> None:
        if self.options.model_step and model_steps.needs_import(self.run):
            _log("importing the model")
            model_steps.import_model(self.options.model_step, self.run, self.attempt)
            self.step += 1

    def _run_ranks(self, command: list[str]) -> int:
        self.attempt.write_env(os.environ)
        self.limit = TimeLimit(self.attempt.path, self.job.deadline)
        self.stall_detector = stall.StallDetector(self.attempt, self.options.stalled_s, time.time())
        _log(f"attempt {self.attempt.name} of {self.run.path} on {', '.join(self.job.nodes)}")
        command, logs_by_node = capture.log_by_node(command, self.attempt.path)
        with open(self.attempt.path / "logs" / "srun.log", "ab") as log:
            srun = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment() | logs_by_node,
                start_new_session=True,  # a signal to the script's process group must not end srun
            )
            while srun.poll() is None:
                time.sleep(POLL_S)
                self._end_stalled_ranks(srun)
                if time.monotonic() >= self._next_check:
                    self._stop_if_cancelled()
                change = self.limit.update()
                if change:
                    _log(change)
        return self._record(srun.returncode)

    def _record_signal(self, number: int, frame: object) -> None:
        self.signals.append(signal.Signals(number).name)
        if self._is_preparing:  # interrupt it: after a scancel, Slurm sends SIGKILL within 30 s
            self._is_preparing = False
            raise _SignalledError

    def _stop_if_cancelled(self) -> None:
        """After a SIGTERM, query Slurm: if the job was cancelled, stop the run, so that no further attempt starts."""
        if "SIGTERM" in self.signals and not self.cancelled:
            state = job_end.current_state(self.job.id, self.run.output(self.job.id))
            self.cancelled = job_end.is_cancelled(state)
            self._next_check = time.monotonic() + CANCELLATION_POLL_S
            if self.cancelled:
                guard.record_cancellation(self.run, self.job.id, state)

    def _environment(self) -> dict[str, str]:
        return os.environ | {
            "SUPERPOD_RUN_DIR": str(self.run.path),
            "SUPERPOD_ATTEMPT": self.attempt.name,
            "SUPERPOD_DEADLINE": str(self.limit.at),
            MARK: str(self.attempt.path),
            heartbeat.LIMIT: str(self.options.stalled_s),
            "SUPERPOD_SAVE_S": str(guard.save_seconds(self.run, self.options.save_s)),
            "MASTER_ADDR": self.job.nodes[0],
            "MASTER_PORT": str(self.job.free_port()),
        }

    def _end_stalled_ranks(self, srun: subprocess.Popen) -> None:
        """If the ranks have stalled, log their stacks and kill them."""
        stall_message = self.stall_detector.check()
        if stall_message and not self.stalled:
            # Request the stacks first: a killed rank writes none.
            job_end.slurm_output("scancel", f"--signal={capture.ASK.name}", f"{self.job.id}.{self.step}")
            stacks.wait_for_logs(self.attempt)
            self.stalled = stacks.describe_stall(stall_message, self.attempt)
            with contextlib.suppress(UserError):
                self.attempt.mark(State.STALLED, message=self.stalled)
            _log(self.stalled)
            job_end.slurm_output("scancel", "--signal=KILL", f"{self.job.id}.{self.step}")
            srun.send_signal(signal.SIGTERM)

    def _kill_strays(self, code: int | None) -> bool:
        """Kill the stray processes of ranks that failed with srun's exit `code`; return whether no node has any."""
        if code and "SIGTERM" not in self.signals:  # Slurm does not start steps in a job that it is ending
            return self.strays.kill(self.attempt.path)
        return not code

    def _record(self, code: int | None) -> int:
        """Record the end of the attempt, kill stray processes, and submit the next job; return this job's exit code.

        `code` is the exit code of srun; None if the ranks were not started.
        """
        newest, done = guard.newest_step(self.run), self.run.done
        slurm_state = job_end.controller_state(self.job.id)
        heartbeats = self.attempt.heartbeats().values()
        # During a preemption, Slurm signals only the steps: ranks receive signals that this process does not.
        self.signals += [str(beat.get("signal", "")) for beat in heartbeats if beat.get("phase") == "stopped"]
        state, message = self._determine_end(code, newest, is_done=done)
        last = max((int(b.get("step", 0)) for b in heartbeats), default=0)
        new_steps = newest - (self.attempt.result.get("before") or 0)
        self.attempt.finish(state, exit_code=code, message=message, last_step=last, checkpoint=newest, new=new_steps)
        _log(f"{state}: {message or f'step {last}'}")
        if self._kill_strays(code):
            self.attempt.finish(state, exit_code=code, message=message, **{ENDED: True})
        if done and state is not State.REQUEUED:
            guard.cancel_chain(self.run, self.job.id)
            return 1 if message else 0

        refusal = self._submit_next() if state is not State.CANCELLED else ""
        if refusal:
            self.attempt.finish(state, exit_code=code, message=f"{message}; {refusal}")
            _log(refusal)
        is_preempted = "SIGTERM" in self.signals and slurm_state == "RUNNING" and state is State.REQUEUED
        if is_preempted and output_of(["scontrol", "requeue", self.job.id], job_end.TIMEOUT_S) is not None:
            time.sleep(600)  # Slurm ends this process within the rest of the grace time
        return 0 if state is State.REQUEUED else 1

    def _determine_end(self, code: int | None, newest: int, *, is_done: bool) -> tuple[State, str]:
        """Export the model if that is pending; return the state of the attempt and a message about its end.

        `code` is srun's exit code, `newest` the step of the newest checkpoint; `is_done` = the last step is trained.
        """
        self._stop_if_cancelled()
        if is_done:
            message = self._export()
            self._stop_if_cancelled()  # the job may have been cancelled during the export
            if not message:
                return State.DONE, ""
            if self.cancelled:
                return State.CANCELLED, message
            return State.REQUEUED if "SIGTERM" in self.signals else State.FAILED, message
        if self.job.is_preempted():
            self.signals.append("SIGTERM")
        if self.cancelled or guard.is_cancelled(self.run):
            return State.CANCELLED, "cancelled by the user"
        if self.stalled:
            return State.STALLED, self.stalled
        if self.signals:
            reason = " and ".join(dict.fromkeys(SIGNAL_MEANINGS.get(name, name) for name in self.signals))
            outlook = f"resumes from step {newest}" if newest else "no checkpoint yet"
            return State.REQUEUED, f"{reason}; {outlook}"
        self._record_kills(code or 0)
        return State.FAILED, guard.failure_message(self.run, self.attempt, code or 0)

    def _record_kills(self, code: int) -> None:
        kills = attempt_end.oom_kills() - self.oom_kills
        killed = attempt_end.describe_kill("srun", -code, kills) if code < 0 else ""
        with contextlib.suppress(UserError):
            self.attempt.mark(State.RUNNING, **{attempt_end.KILLED: killed, attempt_end.OOM_KILLS: kills})

    def _export(self) -> str:
        """Export the fine-tuned model if that is pending; return an error message, or '' on success."""
        if not (self.options.model_step and self.run.has_pending_export):
            return ""
        _log("exporting the best checkpoint")
        return model_steps.export(self.options.model_step, self.run, self.attempt)

    def _submit_next(self) -> str:
        """Submit the next job if the cluster permits that and none is queued; return an error message or ''."""
        if not self.options.self_submit or next_attempt.pending_jobs():
            return ""
        return next_attempt.submit(self.run)


def _wait_for_space(run: RunFolder, job: SlurmJob, self_submit: bool) -> full_disk.Shortage | None:
    """Wait while the disk is full; return None once there is space, or the shortage that remains after the wait.

    Raises _SignalledError if a stop signal arrived during the wait.
    """

    def interrupt(number: int, frame: object) -> None:
        raise _SignalledError

    for number in STOP_SIGNALS:
        signal.signal(number, interrupt)
    try:
        deadline = job.deadline()
        held_s = min(full_disk.HELD_S, (deadline - time.time()) / 2) if deadline else full_disk.HELD_S
        with as_user_errors(run.path):
            return full_disk.wait_for_space(run, _log, held_s=held_s, self_submit=self_submit)
    finally:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)


def _handle_signal_while_waiting(run: RunFolder, job: SlurmJob) -> int:
    """Stop the run if a cancellation interrupted the wait for disk space; return the job's exit code."""
    state = job_end.current_state(job.id, run.output(job.id))
    if job_end.is_cancelled(state):
        guard.record_cancellation(run, job.id, state)
    _log("ended while waiting for disk space; no attempt was started")
    return 0


def _with_hint(error: Exception) -> str:
    if isinstance(error, UserError) and error.hint:
        return f"{error}; {error.hint}"
    return str(error)


def _log(text: str) -> None:
    with contextlib.suppress(OSError):  # on a full disk, the line remains in the buffer
        print(f"{time.strftime('%H:%M:%S')} recipes: {text}", flush=True)


def _exit(code: int) -> None:
    """Exit with `code`. Plain `sys.exit` would exit with 120 if the log cannot be written, as on a full disk."""
    try:
        sys.stdout.flush()
    except OSError:
        # The interpreter flushes stdout again at exit; into /dev/null, that succeeds.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


if __name__ == "__main__":
    _exit(main(sys.argv[1:]))
