"""The files of a run: one folder per training, and in it one numbered folder per attempt (see docs/runs.md)."""

from __future__ import annotations

import contextlib
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

from superpod.errors import UserError
from superpod.node import heartbeat_pages, locks, orphans, owed_export, owner
from superpod.node.checkpoints import discard_unfinished
from superpod.node.files import JsonObject, is_full, is_number, read_json, read_lines, tail_lines, write_json
from superpod.node.run_facts import metrics, problem_in

STATES = ("queued", "running", "saving", "requeued", "done", "failed", "cancelled", "stalled")
DONE = "done"  # the marker's file name, written inside the job
SILENT = "ended without a word (killed?)"

_RESERVE_BYTES = 64 * 1024
_MESSAGE_CHARS = 4000


@dataclass(frozen=True)
class Status:
    """The status of a run: `state` is one of STATES, `message` says why, `attempt` is the last attempt's name or ''."""

    state: str
    message: str = ""
    attempt: str = ""
    exit_code: int | None = None


@dataclass(frozen=True)
class Attempt:
    """One attempt at a run: `RUN/attempts/NNN`."""

    path: Path

    @property
    def name(self) -> str:
        """'001', '002', ..."""
        return self.path.name

    @property
    def result(self) -> JsonObject:
        """The content of result.json; {} if it is unreadable or has none of STATES: an unfinished attempt."""
        result = read_json(self.path / "result.json") or {}
        return result if result.get("state") in STATES else {}

    @property
    def resume(self) -> JsonObject:
        """What it resumed from, as `node/resume.py` decided.

        Of the checkpoint: `step`, `checkpoint` (its name), `samples` (position in the data) and `layout` (Megatron's
        sizes). `lost_steps` are steps that only the damaged ones in `set_aside` held; `words` say all of it in a line.
        Empty where nothing was decided, as by an earlier version.
        """
        resume = self.result.get("resume")
        return resume if isinstance(resume, dict) else {}

    @property
    def logs(self) -> list[Path]:
        """The log files of the ranks, ordered by node and rank."""
        return sorted((self.path / "logs").glob("*.log"), key=lambda p: [int(n) for n in re.findall(r"\d+", p.stem)])

    @property
    def counts(self) -> bool:
        """False if its ranks were not started, because of bad nodes: it is no failure of the run itself."""
        return self.result.get("counts") is not False

    def heartbeat(self, rank: int = 0) -> JsonObject:
        """The newest heartbeat of a rank (t, step, phase, host, moved, allocated_gib, ...); {} before its first."""
        return heartbeat_pages.of_rank(self.path / "heartbeat", rank)

    def heartbeats(self) -> dict[int, JsonObject]:
        """The newest heartbeat of every rank."""
        return heartbeat_pages.of_ranks(self.path / "heartbeat")

    def write_env(self, environ: Mapping[str, str]) -> None:
        """Write env.json: the variables that matter, without secrets; versions, machine, commit. Raises UserError."""
        from superpod.node.redaction import environment_view
        from superpod.node.versions import machine_facts

        with as_user_errors(self.path):
            write_json(self.path / "env.json", {"environment": environment_view(environ), **machine_facts()})

    def mark(self, state: str, **more: object) -> None:
        """Set the state of an unfinished attempt (queued, running, saving). Raises ValueError for another state."""
        if state not in STATES or state == "done":
            raise ValueError(f"no such state of an attempt that goes on: {state}")
        with as_user_errors(self.path):
            write_json(self.path / "result.json", {**self.result, **more, "state": state})

    def finish(self, state: str, *, exit_code: int | None = None, message: str = "", **more: object) -> str:
        """Write the last result.json of the attempt, on a full disk too; returns the state as recorded.

        That is `failed` in place of `done` where the job left no done marker. `more` may hold last_step and the like.
        Raises ValueError for an unknown state.
        """
        if state not in STATES:
            raise ValueError(f"unknown state {state!r}; known: {', '.join(STATES)}")
        if state == "done" and not (self.path.parents[1] / DONE).is_file():
            state, message = "failed", (message or "the job ended, but it never reached its last step (no done marker)")
        ended = {"state": state, "ended": time.time(), "exit_code": exit_code, "message": message[-_MESSAGE_CHARS:]}
        (self.path / ".reserve").unlink(missing_ok=True)  # room for result.json on a full disk
        with as_user_errors(self.path):
            write_json(self.path / "result.json", {**self.result, **more, **ended}, even_in_place=True)
        return state


@dataclass(frozen=True)
class RunFolder:
    """One training: `RUNS/{recipe}/{utc}-{id}`."""

    path: Path

    @classmethod
    def create(cls, runs: Path, recipe: str, *, facts: JsonObject, recipe_lines: list[str]) -> RunFolder:
        """Create a new run folder with run.json (`facts` and recipe, t, id) and recipe.txt.

        Only this user can write to it or replace it (node/owner.py). Raises UserError and leaves nothing if the folder
        cannot be written, a file is in the way, or the disk is full.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", recipe):
            raise UserError(f"{recipe!r} cannot name a folder", "use letters, digits, '.', '_', '+' and '-'")
        with as_user_errors(Path(runs) / recipe), owner.others_cannot_write():
            path = _fresh_folder(owner.folder_in(Path(runs).absolute(), recipe))
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
        """The run at `path`. Raises UserError if there is none, or its run.json has invalid values."""
        run = cls(Path(path).absolute())
        facts = read_json(run.path / "run.json")
        if facts is None:
            raise UserError(
                f"{path} is no run folder: it has no readable run.json",
                "name a folder RUNS/RECIPE/TIME-ID, as `recipes run` prints it",
            )
        if (run.path / "links").is_dir() and not (run.path / "attempts").is_dir():
            moved = f"mv {shlex.quote(str(run.path / 'links'))} {shlex.quote(str(run.path / 'attempts'))}"
            # The script of a run on Slurm carries the runtime of its version, which writes to links/.
            hint = "start a new run" if (run.path / "job.sbatch").exists() else moved
            raise UserError(f"{run.path} was written by version 0.1, which kept its attempts in links/", hint)
        if wrong := problem_in(facts):
            raise UserError(f"{run.path / 'run.json'}: {wrong}", "mend the file, or start a new run")
        return run

    @classmethod
    def latest(cls, runs: Path, recipe: str) -> RunFolder | None:
        """The newest run of a recipe with a readable run.json; None if there is none. Raises as `open`."""
        folders = (recipe, f"{recipe}.{owner.name_of(os.geteuid())}")  # see owner.folder_in
        files = [file for folder in folders for file in (Path(runs).absolute() / folder).glob("*/run.json")]
        readable = [(file.parent, facts) for file in files if (facts := read_json(file)) and not problem_in(facts)]
        # By the second in the folder's name, then by the exact time.
        path, _ = max(readable, key=lambda pair: (pair[0].name[:16], pair[1].get("t", 0)), default=(None, None))
        return cls.open(path) if path else None

    @property
    def facts(self) -> JsonObject:
        """The content of run.json."""
        return read_json(self.path / "run.json") or {}

    @property
    def recipe(self) -> str:
        """The recipe's name."""
        return str(self.facts.get("recipe", self.path.parent.name))

    @property
    def checkpoints(self) -> Path:
        """The folder that NeMo saves to and resumes from."""
        return self.path / "checkpoints"

    def output(self, job: str) -> Path:
        """The output of a Slurm job of the run, without that of its ranks: `slurm-JOB.out`."""
        return self.path / f"slurm-{job}.out"

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts so far, oldest first."""
        return [Attempt(p) for p in sorted((self.path / "attempts").glob("*"), key=_number) if p.name.isdecimal()]

    @property
    def done(self) -> bool:
        """True when the job has written the done marker: max_steps reached, last checkpoint saved."""
        return (self.path / DONE).is_file()

    def metrics(self) -> list[JsonObject]:
        """The last line of each step in metrics.jsonl, by step; corrupted lines are left out."""
        by_step = {line["step"]: line for line in metrics(read_lines(self.path / "metrics.jsonl"))}
        return [by_step[step] for step in sorted(by_step)]

    def newest_metrics(self) -> list[JsonObject]:
        """The last lines of metrics.jsonl (64 KiB) as they were written, repeated steps too."""
        return metrics(tail_lines(self.path / "metrics.jsonl"))

    def reopen(self, max_steps: int) -> JsonObject:
        """Before an attempt, remove the done marker of an earlier one and return it.

        Raises UserError when the run is done at `max_steps` already.
        """
        marker = read_json(self.path / DONE) or {}
        step = marker.get("step")
        step = step if is_number(step) else 0
        if self.done and step >= max_steps:
            raise UserError(f"{self.path} is done at step {step}", f"give it more steps: trainer.max_steps={2 * step}")
        with as_user_errors(self.path):
            (self.path / DONE).unlink(missing_ok=True)
        return marker

    def restore_done(self, marker: JsonObject) -> None:
        """After an attempt without a step, restore the done marker that `reopen` removed. Raises UserError."""
        with as_user_errors(self.path):
            write_json(self.path / DONE, marker)

    def update(self, facts: JsonObject, recipe_lines: list[str]) -> None:
        """After the first step of an attempt, record its facts and recipe for the next attempts. Raises UserError."""
        with as_user_errors(self.path):
            write_json(self.path / "run.json", self.facts | facts)
            (self.path / "recipe.txt").write_text("".join(f"{line}\n" for line in recipe_lines), encoding="utf-8")

    def write_plan(self, plan: JsonObject) -> None:
        """Write plan.json. Raises UserError."""
        with as_user_errors(self.path):
            write_json(self.path / "plan.json", plan)

    def new_attempt(self, *, state: str = "running", job: str = "") -> Attempt:
        """Open the next attempt, in `state`. Do it under `lock()`: a running attempt without a holder counts as killed.

        With a Slurm `job`, Slurm and not the lock knows whether it lives. Raises UserError (no space, no permission),
        and leaves no attempt behind then.
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
                (attempt.path / ".reserve").write_bytes(os.urandom(_RESERVE_BYTES))  # random: zeros may take no space
                start = {"state": state, "started": time.time(), "pid": os.getpid(), "host": socket.gethostname()}
                write_json(attempt.path / "result.json", {**start, "job": job, "attempt": attempt.name})
            except BaseException:  # a full disk, Ctrl-C: an attempt without a result would count as killed
                shutil.rmtree(attempt.path, ignore_errors=True)
                raise
        return attempt

    @contextlib.contextmanager
    def lock(self, *, ranks: bool = True) -> Iterator[None]:
        """Hold the run: one attempt at a time. The kernel lets go when this process dies, however it dies.

        Raises UserError, naming the holder, when another process holds it or ranks of a dead launcher still run. Where
        Slurm has ended the job of those `ranks`, they may be on a node that was cut off, and are not looked for.
        """
        with as_user_errors(self.path):
            handle = locks.take(self.path / locks.LAUNCHER)
        if handle is None:
            who = locks.holder(self.path / locks.LAUNCHER)
            raise UserError(f"{self.path} is in use by {who}", "wait for it, or stop that process")
        try:
            if ranks and locks.is_held(self.path / locks.RANKS):
                raise orphans.still_running(self.path, self.attempts[-1].name if self.attempts else "?")
            with owner.others_cannot_write():
                yield
        finally:
            os.close(handle)

    def state(self) -> str:
        """One of STATES."""
        return self.status().state

    def status(self) -> Status:
        """The status by the done marker, then the last attempt's result, then whether a process holds the run."""
        last = self.attempts[-1] if self.attempts else None
        if self.done:
            return self._done_status(last)
        if last is None:
            return Status("queued", "no attempt yet")
        result = last.result
        state, message = str(result.get("state", "failed")), str(result.get("message", ""))
        if not result or (state in ("running", "saving") and not result.get("job") and not self._is_held()):
            return Status("failed", SILENT, last.name)
        if state == "running" and last.heartbeat().get("phase") == "save":
            state = "saving"
        return Status(state, message, last.name, result.get("exit_code"))

    @property
    def resume_hint(self) -> str:
        """A clause with the command that resumes the run where it ran."""
        facts = self.facts
        verb = "submit" if facts.get("cluster") else "finetune" if "finetune" in facts else "run"
        where = f" --cluster {shlex.quote(str(facts['cluster']))}" if verb == "submit" else ""
        return f"`recipes {verb} {self.recipe} --resume {shlex.quote(str(self.path))}{where}` goes on"

    def _done_status(self, last: Attempt | None) -> Status:
        """The status of a run with a done marker.

        "done", unless an export is pending, or the newest attempt was to add steps and made none.
        """
        if export := owed_export.left(self.path):
            name = last.name if last else ""
            if self._is_held():
                return Status("running", "trained; exporting the best checkpoint", name)
            ended = last.result if last else {}
            why = str(ended.get("killed") or (ended.get("message", "") if ended.get("state") == "failed" else ""))
            words = f"trained to its last step, but {export} is not written; {self.resume_hint} with the export"
            return Status("failed", f"{why}; {words}" if why else words, name)
        result, name = (last.result, last.name) if last else ({}, "")
        state, before = str(result.get("state", "done")), result.get("was_done")
        if before is None or state == "done":
            return Status("done", "", name, result.get("exit_code"))
        words = f"{result.get('message', '')}; no new step was made, and the run was done at step {before} before"
        return Status(state, words.lstrip("; "), name, result.get("exit_code"))

    def discard_unfinished(self) -> list[Path]:
        """Remove incomplete checkpoints by NeMo's marks (node/checkpoints.py), under `lock()`. Raises UserError."""
        with as_user_errors(self.checkpoints):
            return discard_unfinished(self.checkpoints, complete_too=False)

    def _is_held(self) -> bool:
        return locks.is_held(self.path / locks.LAUNCHER) or locks.is_held(self.path / locks.RANKS)


def _fresh_folder(parent: Path) -> Path:
    """Create `parent/{utc}-{id}`; mkdir is atomic, so two processes never get the same folder."""
    while True:
        path = parent / f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path


def _number(path: Path) -> int:
    return int(path.name) if path.name.isdecimal() else -1


@contextlib.contextmanager
def as_user_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a UserError with the next step."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        if is_full(error):
            raise UserError(
                f"no space left for {where}", "make room there, or name another folder for the runs"
            ) from error
        if isinstance(error, (FileExistsError, NotADirectoryError)):
            raise UserError(f"a file is in the way of the folder {where}", "move it, or name another folder") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(f"cannot write {where}: {error.strerror}", "name a folder that you may write to") from error
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise UserError(
                f"the file system of {where} has no file locks", "mount it with flock, or use another"
            ) from error
        raise UserError(f"cannot write {where}: {error.strerror}", "look at that file system") from error
