"""Decides which checkpoint an attempt resumes from, before its ranks start: the newest intact one.

NeMo itself resumes only from `*-last`, a link to the newest checkpoint: if that is damaged, every start fails, and if
the link is dangling, NeMo silently trains from scratch. Here the newest intact checkpoint is taken, whatever its name.
Newer, damaged ones are moved to `RUN/damaged`, never deleted, and the steps lost with them are reported. If there are
checkpoints and none is intact, the run stops. NeMo is shown exactly one checkpoint: the link in `attempts/NNN/resume`.
Standard library only.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from superpod.common.files import JsonObject, append_line, read_lines
from superpod.errors import UserError
from superpod.runtime.checkpoints import checkpoint_files, training_records
from superpod.runtime.checkpoints.checkpoint_files import Problem
from superpod.runtime.checkpoints.checkpoints import MARK, candidates, discard_unfinished, samples_of, step_of
from superpod.runtime.checkpoints.cross_checks import CrossCheck, cross_check
from superpod.runtime.runs.run_folder import Attempt, RunFolder, as_user_errors
from superpod.runtime.runs.run_state import State

FOLDER = "resume"
"""`attempts/NNN/resume`: holds only a link to the checkpoint to resume from; empty for a start at step 1."""

ASIDE = "damaged"
"""`RUN/damaged`: damaged checkpoints are moved here."""

SECOND_LOOK_S = 30.0
"""Pause before a job checks a checkpoint with problems a second time: file systems fail for moments."""

SAVED = "saved.jsonl"
"""`RUN/saved.jsonl`: a line for every checkpoint that was saved, and for every one that has been lost since."""


class NoIntactCheckpointError(UserError):
    """A run has had checkpoints, and none is intact: it stops, since a start at step 1 would discard its training."""


@dataclass(frozen=True)
class Damaged:
    """A damaged checkpoint, newer than the one to resume from."""

    path: Path
    why: str
    unreadable: bool = False
    """the file system failed twice, so its content is unknown: it stays in place, and the next attempt checks it"""

    @property
    def step(self) -> int:
        """Steps done at it; 0 where its name does not say."""
        return step_of(self.path.name) or 0


Examine = Callable[[Path], checkpoint_files.Findings]
"""Checks the files of a checkpoint whose folders and metadata are intact."""


@dataclass(frozen=True)
class Resume:
    """What an attempt resumes from, and which newer checkpoints it cannot use."""

    checkpoint: Path | None
    """None = there has been none yet: it starts at step 1"""
    damaged: tuple[Damaged, ...] = ()
    """newest first"""
    gone: int = 0
    """steps done at the newest checkpoint that was saved and has disappeared; 0 = none is missing"""
    is_verified: bool = True
    """a complete manifest has the checksum of every file of the checkpoint"""
    doubt: str = ""
    """why the checkpoint may hold files of another save; '' = no sign of that"""

    @property
    def step(self) -> int:
        """Steps done at the checkpoint; 0 without one, or where its name does not say."""
        return (step_of(self.checkpoint.name) or 0) if self.checkpoint else 0

    @property
    def lost_steps(self) -> int:
        """Steps that only damaged or missing checkpoints held, and that must be trained again."""
        return max(0, self.gone - self.step, *(damaged.step - self.step for damaged in self.damaged))

    @property
    def words(self) -> str:
        """The decision as one line, for the log and the screen."""
        if not self.checkpoint:
            return "starts at step 1: no checkpoint yet"
        samples = samples_of(self.checkpoint.name)
        position = f", {samples} samples into its data" if samples is not None else ""
        words = f"resumes from step {self.step}{position} ({self.checkpoint.name}, {self._checked})"
        words += "".join(f"; {d.path.name} {self._fate(d)}: {d.why}" for d in self.damaged)
        if self.gone > max(self.step, *(damaged.step for damaged in self.damaged), 0):
            words += f"; the checkpoint of step {self.gone} that had been saved is gone"
        return words + (f"; {self.lost_steps} steps are lost and trained once more" if self.lost_steps else "")

    @property
    def _checked(self) -> str:
        if self.is_verified:
            return "verified"
        return f"unverified: {self.doubt}" if self.doubt else "unverified: it has no complete manifest"

    @staticmethod
    def _fate(damaged: Damaged) -> str:
        return (
            "stays, for nobody can tell what it holds"
            if damaged.unreadable
            else f"is damaged and set aside in {ASIDE}/"
        )

    def facts(self) -> JsonObject:
        """As `resume` in an attempt's result.json."""
        return {
            "step": self.step,
            "checkpoint": self.checkpoint.name if self.checkpoint else None,
            "samples": samples_of(self.checkpoint.name) if self.checkpoint else None,
            "layout": checkpoint_files.saved_layout(self.checkpoint) if self.checkpoint else {},
            "verified": self.is_verified if self.checkpoint else None,
            "lost_steps": self.lost_steps,
            "set_aside": [
                {"checkpoint": d.path.name, "step": d.step, "why": d.why} for d in self.damaged if not d.unreadable
            ],
            "words": self.words,
        }


def decide(
    run: RunFolder,
    examine: Examine = checkpoint_files.check_samples,
    pause: Callable[[], object] = lambda: None,
) -> Resume:
    """What the next attempt resumes from; changes nothing. Call it under the run's lock.

    Args:
        examine: checks the files of a checkpoint; by default their sizes and samples of their bytes.
        pause: waits before a second check.

    Raises:
        NoIntactCheckpointError: there were checkpoints, or trained steps, and none can be resumed from.
        UserError: the checkpoints cannot be listed, or the only ones left cannot be read at the moment.
    """
    with as_user_errors(run.checkpoints):
        resume = newest_usable(run.checkpoints, examine, pause)
        gone = _newest_known(run)
        lost = "" if resume.checkpoint or resume.damaged or gone else training_records.lost_training(run)
    damaged = resume.damaged
    unreadable = [d for d in damaged if d.unreadable]
    if resume.checkpoint is None and unreadable:
        raise UserError(
            f"{run.path} cannot go on now: {unreadable[0].path.name}: {unreadable[0].why}",
            "nothing was changed; look at that file system, and at this node",
        )
    if resume.checkpoint is None and (damaged or gone or lost):
        _refuse(run, damaged, gone, lost)
    return replace(resume, gone=gone) if gone > resume.step else resume


def newest_usable(
    checkpoints: Path,
    examine: Examine = checkpoint_files.check_samples,
    pause: Callable[[], object] = lambda: None,
) -> Resume:
    """The newest checkpoint of a folder that a training can resume from, and the newer ones that are damaged.

    A checkpoint that NeMo has marked as unfinished is used if it is complete: its save was killed after the last byte,
    before the mark was removed. If it is incomplete it is not counted as damaged. A problem counts if a second check,
    after `pause` and on this node, finds it too. A doubtful checkpoint is used only if there is no other.

    Raises:
        OSError: the folder cannot be listed.
    """
    damaged, doubtful = [], None
    folders = candidates(checkpoints)
    for checkpoint in folders:
        problems, is_verified = _problems(checkpoint, examine, pause)
        doubt = ""
        if not problems and not is_verified:
            found = _cross_checked(checkpoint, folders)
            problems, doubt = found.problems, found.doubt
        if problems:
            unreadable = checkpoint_files.is_unreadable(problems)
            if unreadable or not checkpoint.with_name(f"{checkpoint.name}{MARK}").exists():
                damaged.append(Damaged(checkpoint, "; ".join(map(str, problems[:3])), unreadable))
            continue
        decided = Resume(checkpoint, tuple(damaged), is_verified=is_verified, doubt=doubt)
        if not doubt:
            return decided if doubtful is None else _instead_of(doubtful, decided)
        doubtful = doubtful or decided
    return doubtful or Resume(None, tuple(damaged))


def _instead_of(doubtful: Resume, decided: Resume) -> Resume:
    """The decision for an older checkpoint instead of a newer, doubtful one, which is set aside."""
    if doubtful.checkpoint is None or doubtful.step == decided.step:  # a second copy of the same step stays
        return decided
    aside = Damaged(doubtful.checkpoint, doubtful.doubt)
    return replace(decided, damaged=tuple(sorted((*decided.damaged, aside), key=lambda d: d.step, reverse=True)))


def _cross_checked(checkpoint: Path, folders: list[Path]) -> CrossCheck:
    try:
        return cross_check(checkpoint, [folder for folder in folders if folder != checkpoint])
    except (OSError, ValueError) as error:
        return CrossCheck([Problem.unreadable(error)])


def _problems(checkpoint: Path, examine: Examine, pause: Callable[[], object]) -> tuple[list[Problem], bool]:
    """The problems that two checks have found and that prevent resuming; and whether the checkpoint is verified."""
    if _structure_problems(checkpoint):
        pause()
        if problems := _structure_problems(checkpoint):
            return problems, False
    try:
        found = examine(checkpoint)
        if problems := checkpoint_files.resume_blockers(found.problems):
            pause()
            found = checkpoint_files.check_samples(checkpoint, files=[problem.file for problem in problems])
    except (OSError, ValueError) as error:
        return [Problem.unreadable(error)], False
    return checkpoint_files.resume_blockers(found.problems), found.is_verified


def _structure_problems(checkpoint: Path) -> list[Problem]:
    return checkpoint_files.resume_blockers(checkpoint_files.structure_problems(checkpoint))


def decide_by_sizes(run: RunFolder) -> Resume:
    """As `decide`, but fast: only the names and sizes of files are checked, and none is read.

    The next attempt resumes from this checkpoint unless its bytes turn out to be damaged.

    Raises:
        NoIntactCheckpointError, UserError: as `decide`.
    """
    return decide(run, functools.partial(checkpoint_files.check_sizes, marked=False))


def apply_decision(run: RunFolder, attempt: Attempt, resume: Resume) -> None:
    """Apply the decision: set damaged ones aside, remove unfinished ones, link the checkpoint for NeMo, and record it.

    Call it under the run's lock, before the ranks start. Raises UserError.
    """
    with as_user_errors(run.path):
        for damaged in resume.damaged:
            if not damaged.unreadable:
                _set_aside(damaged.path)
                append_line(run.path / SAVED, {"t": time.time(), "lost": damaged.why, **_named(damaged.path)})
        unknown = {damaged.path.name: damaged.step for damaged in resume.damaged if damaged.unreadable}
        if resume.gone > max(resume.step, *unknown.values(), 0):
            append_line(run.path / SAVED, {"t": time.time(), "lost": "gone", "after": resume.step})
        if resume.checkpoint:
            resume.checkpoint.with_name(f"{resume.checkpoint.name}{MARK}").unlink(missing_ok=True)
        discard_unfinished(run.checkpoints, but=unknown)
        folder = attempt.path / FOLDER
        folder.mkdir(exist_ok=True)
        if resume.checkpoint:  # NeMo looks for a folder whose name ends so
            link = folder / f"{resume.checkpoint.name.removesuffix('-last')}-last"
            link.symlink_to(os.path.relpath(resume.checkpoint, folder))  # relative: a run folder may be moved
    attempt.mark(State.RUNNING, resume=resume.facts())


def record_saved(run: Path, checkpoint: Path) -> None:
    """Record that a checkpoint is complete. Raises OSError."""
    append_line(run / SAVED, {"t": time.time(), **_named(checkpoint)})


def _named(checkpoint: Path) -> JsonObject:
    return {"checkpoint": checkpoint.name, "step": step_of(checkpoint.name) or 0}


def _newest_known(run: RunFolder) -> int:
    """Steps done at the newest checkpoint that the run has saved, as far as is known, without those recorded as lost.

    From the lines of SAVED, the last attempt's result, and NeMo's dangling links.
    """
    known: dict[str, int] = {}
    for line in read_lines(run.path / SAVED):
        name, step = str(line.get("checkpoint", "")), line.get("step")
        if "after" in line:
            known = {name: step for name, step in known.items() if step <= int(line["after"])}
        elif "lost" in line:
            known.pop(name, None)
        elif isinstance(step, int):
            known[name] = step
    newest_first = (attempt.result for attempt in reversed(training_records.counted(run)))
    last = next((r for r in newest_first if "ended" in r or "resume" in r), {})  # not the attempt that is starting
    decided = last["resume"] if isinstance(last.get("resume"), dict) else {}
    results = [last.get("checkpoint"), last.get("before"), decided.get("step")]
    entries = run.checkpoints.iterdir() if run.checkpoints.is_dir() else ()
    linked = [step_of(entry.name) or 0 for entry in entries if entry.is_symlink() and not entry.exists()]
    return max([0, *known.values(), *(step for step in results if isinstance(step, int)), *linked])


def _refuse(run: RunFolder, damaged: Sequence[Damaged], gone: int, lost: str) -> None:
    """Raise NoIntactCheckpointError with what is wrong with the two newest, and the next step."""
    names = [f"{d.path.name}: {d.why}" for d in damaged]
    if damaged:
        more = f"; and {len(names) - 2} more" if len(names) > 2 else ""
        problem = f"none of its {len(names)} checkpoints is intact: {'; '.join(names[:2])}{more}"
    elif gone:
        problem = f"its checkpoint of step {gone} is gone, and there is no other"
    else:
        problem = f"{lost}, but {run.checkpoints} holds no checkpoint"
    raise NoIntactCheckpointError(
        f"{run.path} cannot go on: {problem}",
        f"nothing was changed; put an intact copy into {run.checkpoints} (`recipes ckpt verify` checks it), "
        f"or start over at step 1 with `recipes ckpt reset {shlex.quote(str(run.path))}`, or start a new run",
    )


def _set_aside(checkpoint: Path) -> None:
    """Move a checkpoint to ASIDE under a free name; one that cannot be moved stays."""
    folder = checkpoint.parent.resolve().parent / ASIDE  # the same file system, so that a move copies nothing
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        number = 1
        while (target := folder / (checkpoint.name + (f".{number}" if number > 1 else ""))).exists():
            number += 1
        checkpoint.rename(target)
