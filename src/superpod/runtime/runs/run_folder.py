"""Create, read and lock the folder of a run, which has one numbered folder per attempt (see docs/runs.md)."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import secrets
import shlex
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from superpod.common import locks
from superpod.common.json_files import (
    JsonObject,
    is_full,
    is_number,
    read_json,
    tail_lines,
    tail_text,
    write_json,
)
from superpod.errors import UserError
from superpod.runtime.checkpoints.checkpoint_folder import discard_unfinished
from superpod.runtime.heartbeat import heartbeat_pages
from superpod.runtime.processes.attempt_processes import ranks_without_launcher
from superpod.runtime.runs import owner, pending_export, run_state
from superpod.runtime.runs.run_facts import METRICS, last_of_each_step, metrics, problem_in, read_metrics
from superpod.runtime.runs.run_state import (
    CHAIN,
    DONE,
    RESUMED,
    SCRIPT,
    STATES,
    STOP,
    AttemptFiles,
    RunFiles,
    SlurmJobs,
    State,
    Status,
    Stop,
)

_RESERVE_BYTES = 64 * 1024
_MESSAGE_CHARS = 4000


@dataclass(frozen=True)
class Attempt:
    """An attempt of a run; its folder is `RUN/attempts/NNN`."""

    path: Path

    @property
    def name(self) -> str:
        """The name of its folder: '001', '002', ..."""
        return self.path.name

    @property
    def result(self) -> JsonObject:
        """The content of result.json; {} if it cannot be read or has an unknown state."""
        result = read_json(self.path / "result.json") or {}
        return result if result.get("state") in STATES else {}

    @property
    def resume(self) -> JsonObject:
        """The checkpoint from which the attempt resumes (`runtime/checkpoints/resume.py`); {} before it is selected.

        Keys: `step`, `checkpoint` (its name), `samples` (position in the data), `layout` (parallel sizes), `set_aside`
        (corrupt checkpoints), `lost_steps` (steps that only these contained), and `words` (a summary in one line).
        """
        resume = self.result.get("resume")
        return resume if isinstance(resume, dict) else {}

    @property
    def logs(self) -> list[Path]:
        """The log files of the ranks, ordered by node and rank."""
        return sorted((self.path / "logs").glob("*.log"), key=lambda p: [int(n) for n in re.findall(r"\d+", p.stem)])

    @property
    def counts(self) -> bool:
        """Whether the attempt counts toward the maximum number. False if bad nodes kept its ranks from starting."""
        return self.result.get("counts") is not False

    def heartbeat(self, rank: int = 0) -> JsonObject:
        """Return the newest heartbeat of a rank (keys: `heartbeat_pages.decode`); {} if there is none."""
        return heartbeat_pages.read_rank(self.path / "heartbeat", rank)

    def heartbeats(self) -> dict[int, JsonObject]:
        """Return the newest heartbeat of each rank, by rank."""
        return heartbeat_pages.read_ranks(self.path / "heartbeat")

    def write_env(self, environ: Mapping[str, str]) -> None:
        """Write env.json: environment variables without secrets, versions, commit, machine. Raises UserError."""
        from superpod.common.redaction import environment_view
        from superpod.runtime.runs.versions import machine_facts

        with as_user_errors(self.path):
            write_json(self.path / "env.json", {"environment": environment_view(environ), **machine_facts()})

    def mark(self, state: str, **more: object) -> None:
        """Set the state of an unfinished attempt and further keys of its result.json.

        Raises ValueError if the state is unknown or `done`, and UserError if the file cannot be written.
        """
        if state not in STATES or state == State.DONE:
            raise ValueError(f"{state!r} is not a state of an unfinished attempt")
        with as_user_errors(self.path):
            write_json(self.path / "result.json", {**self.result, **more, "state": state})

    def finish(self, state: str, *, exit_code: int | None = None, message: str = "", **more: object) -> str:
        """Write the final result.json of the attempt, even on a full disk; return the recorded state.

        `done` is recorded as `failed` if there is no done marker. `more` contains further keys, such as last_step.
        Raises ValueError if the state is unknown, and UserError if the file cannot be written.
        """
        if state not in STATES:
            raise ValueError(f"unknown state {state!r}; the states are {', '.join(STATES)}")
        if state == State.DONE and not (self.path.parents[1] / DONE).is_file():
            state = State.FAILED
            message = message or "the job ended before its last step (no done marker)"
        end_facts = {"state": state, "ended": time.time(), "exit_code": exit_code, "message": message[-_MESSAGE_CHARS:]}
        (self.path / ".reserve").unlink(missing_ok=True)  # frees space for result.json on a full disk
        with as_user_errors(self.path):
            write_json(self.path / "result.json", {**self.result, **more, **end_facts}, even_in_place=True)
        return state


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run: `RUNS/{recipe}/{utc}-{id}`."""

    path: Path

    @classmethod
    def create(cls, runs: Path, recipe: str, *, facts: JsonObject, recipe_lines: list[str]) -> RunFolder:
        """Create a run folder in `runs` with run.json (`facts`, recipe, t and id) and recipe.txt (`recipe_lines`).

        Only this user can write to it or replace it (owner.py). Raises UserError, and leaves no files, if `runs` is not
        writable, a file with the name of the recipe exists, or the disk is full.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", recipe):
            raise UserError(f"{recipe!r} is not a valid folder name", "use letters, digits, '.', '_', '+' and '-'")
        with as_user_errors(Path(runs) / recipe), owner.restrict_umask():
            path = _create_unique_folder(owner.folder_in(Path(runs).absolute(), recipe))
            try:
                for name in ("checkpoints", "attempts"):
                    (path / name).mkdir()
                (path / "recipe.txt").write_text("".join(f"{line}\n" for line in recipe_lines), encoding="utf-8")
                write_json(path / "run.json", {**facts, "recipe": recipe, "id": path.name, "t": time.time()})
            except OSError:
                shutil.rmtree(path, ignore_errors=True)
                raise
        return cls(path)

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """Open the run with the folder `path`. Raises UserError if run.json is missing or has invalid values."""
        run = cls(Path(path).absolute())
        facts = read_json(run.path / "run.json")
        if facts is None:
            raise UserError(
                f"{path} is not a run folder: it has no readable run.json",
                "pass a folder RUNS/RECIPE/TIME-ID, which `recipes run` prints",
            )
        if (run.path / "links").is_dir() and not (run.path / "attempts").is_dir():
            move_command = f"mv {shlex.quote(str(run.path / 'links'))} {shlex.quote(str(run.path / 'attempts'))}"
            # The script of a Slurm run contains the runtime of its version, which writes to links/.
            hint = "start a new run" if (run.path / "job.sbatch").exists() else f"run `{move_command}`"
            raise UserError(f"{run.path} was written by version 0.1, which stored attempts in links/", hint)
        problem = problem_in(facts)
        if problem:
            raise UserError(f"{run.path / 'run.json'}: {problem}", "correct the file, or start a new run")
        return run

    @classmethod
    def latest(cls, runs: Path, recipe: str) -> RunFolder | None:
        """Return a recipe's newest run in `runs` with a valid run.json; None if there is none. Raises UserError."""
        folders = (recipe, f"{recipe}.{owner.user_name(os.geteuid())}")  # see owner.folder_in
        files = [file for folder in folders for file in (Path(runs).absolute() / folder).glob("*/run.json")]
        newest, newest_key = None, ("", 0.0)
        for file in files:
            facts = read_json(file)
            if not facts or problem_in(facts):
                continue
            key = (file.parent.name[:16], facts.get("t", 0))  # the time in the folder's name, in s, then the exact time
            if newest is None or key > newest_key:
                newest, newest_key = file.parent, key
        return cls.open(newest) if newest else None

    @property
    def facts(self) -> JsonObject:
        """The content of run.json."""
        return read_json(self.path / "run.json") or {}

    @property
    def recipe(self) -> str:
        """The name of the recipe."""
        return str(self.facts.get("recipe", self.path.parent.name))

    @property
    def checkpoints(self) -> Path:
        """The folder in which NeMo saves checkpoints."""
        return self.path / "checkpoints"

    def output(self, job: str) -> Path:
        """Return the path of the output of a job's batch script, `slurm-JOB.out`; that of the ranks is elsewhere."""
        return self.path / f"slurm-{job}.out"

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts so far, oldest first."""
        folders = [folder for folder in (self.path / "attempts").glob("*") if folder.name.isdecimal()]
        return [Attempt(folder) for folder in sorted(folders, key=lambda folder: int(folder.name))]

    @property
    def done(self) -> bool:
        """Whether the done marker exists: max_steps are trained, and the last checkpoint is saved."""
        return (self.path / DONE).is_file()

    @property
    def is_local(self) -> bool:
        """Whether the run was started without Slurm, so that a lock shows whether it is running."""
        last = self.attempts[-1] if self.attempts else None
        attempt = AttemptFiles(last.name, last.result) if last else None
        return run_state.is_local(attempt, has_script=(self.path / SCRIPT).exists())

    @property
    def stop(self) -> Stop | None:
        """The content of the stop marker; None if there is none. An unreadable marker stops the run too."""
        marker = read_json(self.path / STOP)
        if marker is None and not os.path.lexists(self.path / STOP):
            return None
        return Stop.from_marker(marker)

    @property
    def resumed_after(self) -> int:
        """The number of the newest attempt when the user resumed the stopped run; 0 if the user never did."""
        attempt_name = (read_json(self.path / RESUMED) or {}).get("after")
        return int(attempt_name) if is_number(attempt_name) else 0

    @property
    def has_pending_export(self) -> bool:
        """Whether training is done, but the Hugging Face folder has not been exported yet."""
        return self.done and pending_export.folder_of(self.path) is not None

    def metrics(self) -> list[JsonObject]:
        """Return the last valid line of each step in metrics.jsonl, ordered by step."""
        return last_of_each_step(read_metrics(self.path))

    def newest_metrics(self) -> list[JsonObject]:
        """Return the valid lines in the last 64 KiB of metrics.jsonl, including repeated steps."""
        return metrics(tail_lines(self.path / METRICS))

    def reopen(self, max_steps: int) -> JsonObject:
        """Remove the done marker before more steps are trained; return its content, {} if there is none.

        Raises UserError if the run has trained `max_steps` steps already.
        """
        marker = read_json(self.path / DONE) or {}
        step = marker.get("step")
        if not is_number(step):
            step = 0
        if self.done and step >= max_steps:
            hint = f"to train more steps, set for example trainer.max_steps={2 * step}"
            raise UserError(f"{self.path} is done at step {step}", hint)
        with as_user_errors(self.path):
            # The next attempt writes it again; until then, the run must not count as done.
            (self.path / DONE).unlink(missing_ok=True)
        return marker

    def restore_done(self, marker: JsonObject) -> None:
        """Write back the done marker that `reopen` returned, after an attempt without a step. Raises UserError."""
        with as_user_errors(self.path):
            write_json(self.path / DONE, marker)

    def update(self, facts: JsonObject, recipe_lines: list[str]) -> None:
        """Add `facts` to run.json and replace the lines of recipe.txt. Raises UserError."""
        with as_user_errors(self.path):
            write_json(self.path / "run.json", self.facts | facts)
            (self.path / "recipe.txt").write_text("".join(f"{line}\n" for line in recipe_lines), encoding="utf-8")

    def write_plan(self, plan: JsonObject) -> None:
        """Write `plan` to plan.json. Raises UserError."""
        with as_user_errors(self.path):
            write_json(self.path / "plan.json", plan)

    def new_attempt(self, *, state: str = "running", job: str = "") -> Attempt:
        """Create the next attempt in the state `state`; `job` is the id of its Slurm job, '' without Slurm.

        The caller holds `lock()`, since a running attempt without Slurm counts as killed if nobody holds it. Raises
        UserError, and leaves no attempt, if there is no space or no permission.
        """
        with as_user_errors(self.path):
            while True:
                number = 1 + max((int(attempt.name) for attempt in self.attempts), default=0)
                attempt = Attempt(self.path / "attempts" / f"{number:03d}")
                with contextlib.suppress(FileExistsError):
                    attempt.path.mkdir()
                    break
            try:
                for name in ("logs", "heartbeat"):
                    (attempt.path / name).mkdir()
                # Random bytes, since file systems may compress zeros.
                (attempt.path / ".reserve").write_bytes(os.urandom(_RESERVE_BYTES))
                start = {"state": state, "started": time.time(), "pid": os.getpid(), "host": socket.gethostname()}
                write_json(attempt.path / "result.json", {**start, "job": job, "attempt": attempt.name})
            except BaseException:  # otherwise an attempt without a result would count as killed
                shutil.rmtree(attempt.path, ignore_errors=True)
                raise
        return attempt

    @contextlib.contextmanager
    def lock(self, *, ranks: bool = True) -> Iterator[None]:
        """Hold the lock of the run, so that one attempt runs at a time. The kernel releases it when this process exits.

        Raises UserError, naming the holder, if another process holds it or ranks of a dead launcher are still running.
        With `ranks` False, ranks are not checked, since Slurm has ended their job or they are on an unreachable node.
        """
        with as_user_errors(self.path):
            handle = locks.acquire(self.path / locks.LAUNCHER)
        if handle is None:
            holder = locks.holder(self.path / locks.LAUNCHER)
            raise UserError(f"{self.path} is in use by {holder}", "wait until it exits, or terminate it")
        try:
            if ranks and locks.is_held(self.path / locks.RANKS):
                raise ranks_without_launcher(self.path, self.attempts[-1].name if self.attempts else "?")
            with owner.restrict_umask():
                yield
        finally:
            os.close(handle)

    def state(self) -> State:
        """Return the state of the run, based on its files alone."""
        return self.status().state

    def status(self, slurm: SlurmJobs | None = None, now: float | None = None) -> Status:
        """Return the state of the run and a message, based on its files and, if given, its Slurm jobs.

        `now` is the Unix time for stall detection; None = the current time.
        """
        return run_state.status_of(self.state_files(), slurm, now or time.time())

    def state_files(self) -> RunFiles:
        """Read the files that determine the state of the run."""
        last = self.attempts[-1] if self.attempts else None
        attempt = AttemptFiles(last.name, last.result) if last else None
        export_folder = pending_export.folder_of(self.path)
        is_locked = False
        # Heartbeats of thousands of ranks, and locks on a network file system, are read only if they matter.
        if last and attempt and attempt.may_be_alive:
            attempt = dataclasses.replace(attempt, heartbeats=last.heartbeats())
        if export_folder or (attempt and attempt.may_be_alive and attempt.is_local):
            is_locked = locks.is_held(self.path / locks.LAUNCHER) or locks.is_held(self.path / locks.RANKS)
        return RunFiles(
            path=self.path,
            facts=self.facts,
            is_done=self.done,
            stop=self.stop,
            resumed_after=self.resumed_after,
            pending_export=export_folder,
            is_locked=is_locked,
            attempt=attempt,
            has_script=(self.path / SCRIPT).exists(),
            has_chain=(self.path / CHAIN).exists(),
            job_output=None if attempt else self._last_job_output(),
        )

    def _last_job_output(self) -> str | None:
        """Return `slurm-JOB.out: LAST LINE` for the newest job; None if there is none."""
        for path in sorted(self.path.glob("slurm-*.out"))[-1:]:
            with contextlib.suppress(OSError):
                for line in reversed(tail_text(path, 4096).splitlines()):
                    if line.strip():
                        return f"{path.name}: {line.strip()[-400:]}"
        return None

    @property
    def resume_hint(self) -> str:
        """A clause with the command that resumes the run: "`recipes run ...` resumes it"."""
        return run_state.resume_hint(self.path, self.facts)

    def discard_unfinished(self) -> list[Path]:
        """Remove incomplete checkpoints that NeMo has marked; return their paths. The caller holds `lock()`.

        Raises UserError.
        """
        with as_user_errors(self.checkpoints):
            return discard_unfinished(self.checkpoints, complete_too=False)


def _create_unique_folder(parent: Path) -> Path:
    """Create `parent/{utc}-{id}` and return it. Since mkdir is atomic, two processes never get the same folder."""
    while True:
        path = parent / f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path


@contextlib.contextmanager
def as_user_errors(path: Path) -> Iterator[None]:
    """Convert an OSError within the block to a UserError with a hint; `path` is named if the error names no file."""
    try:
        yield
    except OSError as error:
        location = error.filename or path
        if is_full(error):
            message, hint = f"no space left for {location}", "free up space, or use a folder for runs on another disk"
        elif isinstance(error, (FileExistsError, NotADirectoryError)):
            message, hint = f"{location} must be a folder, but a file exists there", "move it, or use another folder"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            message = f"cannot write {location}: {error.strerror}"
            hint = "use a folder for which you have write permission"
        elif error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            message = f"the file system of {location} does not support file locks"
            hint = "mount it with flock, or use another file system"
        else:
            message, hint = f"cannot write {location}: {error.strerror}", "check the file system"
        raise UserError(message, hint) from error
