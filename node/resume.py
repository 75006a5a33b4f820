"""What an attempt resumes from: decided before its ranks start, from the newest checkpoint that is whole.

NeMo by itself resumes from `*-last` only, a link to the newest checkpoint: where that is damaged it dies at every
start, and where the link leads nowhere it starts from scratch without a word. Here the newest whole checkpoint is
taken, whatever its name. Newer ones that are not whole are moved to `RUN/damaged`, never deleted, and the steps that
only they held are counted. With damaged ones and no whole one, the run stops. NeMo finds exactly one checkpoint: the
link in `attempts/NNN/resume`. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from superpod.errors import UserError
from superpod.node import checkpoint_files, training_records
from superpod.node.checkpoints import MARK, candidates, discard_unfinished, samples_of, step_of
from superpod.node.cross_checks import CrossCheck, cross_check
from superpod.node.files import JsonObject, append_line, read_lines
from superpod.node.run_folder import Attempt, RunFolder, as_user_errors

FOLDER = "resume"
"""`attempts/NNN/resume`: a link to what the attempt resumes from, the one thing in it; empty for a start at step 1."""

ASIDE = "damaged"
"""`RUN/damaged`: where checkpoints that are not whole are moved to."""

SECOND_LOOK_S = 30.0
"""After this pause a job judges once more what has kept it from a checkpoint: file systems fail for moments."""

SAVED = "saved.jsonl"
"""`RUN/saved.jsonl`: a line for every checkpoint that was saved, and for every one that was lost since."""


class NoWholeCheckpointError(UserError):
    """A run had checkpoints, and none is whole: it stops, for a start at step 1 would throw its training away."""


@dataclass(frozen=True)
class Damaged:
    """A checkpoint that is not whole, newer than the one that is resumed from."""

    path: Path
    why: str
    unreadable: bool = False
    """nobody knows what it holds, for the file system failed twice: it stays where it is, and is judged next time"""

    @property
    def step(self) -> int:
        """Steps done at it; 0 where its name does not say."""
        return step_of(self.path.name) or 0


Examine = Callable[[Path], checkpoint_files.Findings]
"""Looks at the files of a checkpoint whose folders and metadata are right."""


@dataclass(frozen=True)
class Resume:
    """What an attempt resumes from, and what it could not resume from."""

    checkpoint: Path | None
    """None: there has been no checkpoint yet, so it starts at step 1"""
    damaged: tuple[Damaged, ...] = ()
    """newest first"""
    gone: int = 0
    """steps done at the newest checkpoint that was saved and is not there any more; 0 = none is missing"""
    is_verified: bool = True
    """a manifest vouches for every byte of the checkpoint"""
    doubt: str = ""
    """why the checkpoint may hold files of another save; '' = nothing tells so"""

    @property
    def step(self) -> int:
        """Steps done at the checkpoint; 0 without one, or where its name does not say."""
        return (step_of(self.checkpoint.name) or 0) if self.checkpoint else 0

    @property
    def lost_steps(self) -> int:
        """Steps that only damaged or missing checkpoints held, and that must be trained once more."""
        return max(0, self.gone - self.step, *(damaged.step - self.step for damaged in self.damaged))

    @property
    def words(self) -> str:
        """The decision as a line for logs and screens."""
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
            "layout": checkpoint_files.saved_under(self.checkpoint) if self.checkpoint else {},
            "verified": self.is_verified if self.checkpoint else None,
            "lost_steps": self.lost_steps,
            "set_aside": [
                {"checkpoint": d.path.name, "step": d.step, "why": d.why} for d in self.damaged if not d.unreadable
            ],
            "words": self.words,
        }


def decide(
    run: RunFolder,
    examine: Examine = checkpoint_files.look,
    pause: Callable[[], object] = lambda: None,
) -> Resume:
    """What the next attempt resumes from. Changes nothing.

    `examine` looks at the files of a checkpoint, at each of them and not at all their bytes; `pause` passes the time
    before a second look. Call it under the run's lock. Raises NoWholeCheckpointError, and UserError when the
    checkpoints cannot be listed or nobody can tell whether one is complete.
    """
    with as_user_errors(run.checkpoints):
        resume = newest_usable(run.checkpoints, examine, pause)
        gone = _newest_known(run)
        lost = "" if resume.checkpoint or resume.damaged or gone else training_records.lost_training(run)
    damaged = resume.damaged
    if resume.checkpoint is None and (unknown := [d for d in damaged if d.unreadable]):
        raise UserError(
            f"{run.path} cannot go on now: {unknown[0].path.name}: {unknown[0].why}",
            "nothing was changed; look at that file system, and at this node",
        )
    if resume.checkpoint is None and (damaged or gone or lost):
        _refuse(run, damaged, gone, lost)
    return replace(resume, gone=gone) if gone > resume.step else resume


def newest_usable(
    checkpoints: Path,
    examine: Examine = checkpoint_files.look,
    pause: Callable[[], object] = lambda: None,
) -> Resume:
    """The newest checkpoint of a folder that a training can resume from, and the damaged ones that are newer.

    One that NeMo has marked as unfinished counts if all of it is there (its save was killed between the last byte and
    the removal of the mark); otherwise it is debris, and not damage. What speaks against a checkpoint must do so twice,
    with a `pause` between, and the second time on this node. One in doubt is taken only where there is no other.
    Raises OSError.
    """
    damaged, doubtful = [], None
    folders = candidates(checkpoints)
    for checkpoint in folders:
        stopping, is_verified = _stopping(checkpoint, examine, pause)
        doubt = ""
        if not stopping and not is_verified:
            found = _cross_checked(checkpoint, folders)
            stopping, doubt = found.problems, found.doubt
        if stopping:
            unreadable = checkpoint_files.is_unreadable(stopping)
            if unreadable or not checkpoint.with_name(f"{checkpoint.name}{MARK}").exists():
                damaged.append(Damaged(checkpoint, "; ".join(stopping[:3]), unreadable))
            continue
        decided = Resume(checkpoint, tuple(damaged), is_verified=is_verified, doubt=doubt)
        if not doubt:
            return decided if doubtful is None else _without(doubtful, decided)
        doubtful = doubtful or decided
    return doubtful or Resume(None, tuple(damaged))


def _without(doubtful: Resume, decided: Resume) -> Resume:
    """The decision for an older checkpoint, in place of a newer one in doubt."""
    if doubtful.checkpoint is None:
        return decided
    aside = Damaged(doubtful.checkpoint, doubtful.doubt)
    if doubtful.step == decided.step:  # a second copy of the same step costs nothing, and stays
        return decided
    return replace(decided, damaged=tuple(sorted((*decided.damaged, aside), key=lambda d: d.step, reverse=True)))


def _cross_checked(checkpoint: Path, folders: list[Path]) -> CrossCheck:
    try:
        return cross_check(checkpoint, [folder for folder in folders if folder != checkpoint])
    except (OSError, ValueError) as error:  # its files could be read a moment ago
        return CrossCheck([f"it{checkpoint_files.UNREADABLE}{error}"])


def _stopping(checkpoint: Path, examine: Examine, pause: Callable[[], object]) -> tuple[list[str], bool]:
    """What keeps a training from resuming from a checkpoint, and did so at a second look; whether it is verified."""
    for is_last in (False, True):
        wrong = checkpoint_files.keeps_from_resuming(checkpoint_files.structure_problems(checkpoint))
        if not wrong:
            break
        if is_last:
            return wrong, False
        pause()
    try:
        found = examine(checkpoint)
        wrong = checkpoint_files.keeps_from_resuming(found.problems)
        if wrong:
            pause()
            found = checkpoint_files.look(checkpoint, named_in=wrong)
            wrong = checkpoint_files.keeps_from_resuming(found.problems)
    except (OSError, ValueError) as error:  # its metadata was right a moment ago
        return [f"it{checkpoint_files.UNREADABLE}{error}"], False
    return wrong, found.is_verified


def refuse_if_none(run: RunFolder) -> Resume:
    """Refuse a run that had checkpoints of which none is complete by names and sizes: quick, without reading them.

    What it returns is what the next attempt resumes from, unless a look at their bytes finds damage.

    Raises:
        NoWholeCheckpointError: there is nothing to go on from.
    """
    return decide(run, _by_sizes)


def _by_sizes(checkpoint: Path) -> checkpoint_files.Findings:
    return checkpoint_files.survey(checkpoint, marked=False)


def settle(run: RunFolder, attempt: Attempt, resume: Resume) -> None:
    """Make the decision true: set damaged ones aside, remove debris, link the checkpoint for NeMo, and record it.

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
    attempt.mark("running", resume=resume.facts())


def note_saved(run: Path, checkpoint: Path) -> None:
    """Record that a checkpoint is complete. Raises OSError."""
    append_line(run / SAVED, {"t": time.time(), **_named(checkpoint)})


def _named(checkpoint: Path) -> JsonObject:
    return {"checkpoint": checkpoint.name, "step": step_of(checkpoint.name) or 0}


def _newest_known(run: RunFolder) -> int:
    """Steps done at the newest checkpoint that the run is known to have saved, and that is not known as lost.

    From the lines of SAVED, from what the last attempt recorded, and from NeMo's links to what is not there.
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
    last = next((r for r in newest_first if "ended" in r or "resume" in r), {})  # not the one that is just opened
    decided = last.get("resume") if isinstance(last.get("resume"), dict) else {}
    results = [last.get("checkpoint"), last.get("before"), (decided or {}).get("step")]
    links = [entry for entry in _entries(run.checkpoints) if entry.is_symlink() and not entry.exists()]
    linked = [step_of(entry.name) or 0 for entry in links]
    return max([0, *known.values(), *(step for step in results if isinstance(step, int)), *linked])


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _refuse(run: RunFolder, damaged: Sequence[Damaged], gone: int, lost: str) -> None:
    """Raise NoWholeCheckpointError with what is wrong with the two newest, and the next step."""
    names = [f"{d.path.name}: {d.why}" for d in damaged]
    if damaged:
        more = f"; and {len(names) - 2} more" if len(names) > 2 else ""
        problem = f"none of its {len(names)} checkpoints is whole: {'; '.join(names[:2])}{more}"
    elif gone:
        problem = f"its checkpoint of step {gone} is gone, and there is no other"
    else:
        problem = f"{lost}, but {run.checkpoints} holds no checkpoint"
    raise NoWholeCheckpointError(
        f"{run.path} cannot go on: {problem}",
        f"nothing was changed; put a whole copy into {run.checkpoints} (`recipes ckpt verify` judges it), "
        f"or start over at step 1 with `recipes ckpt reset {shlex.quote(str(run.path))}`, or start a new run",
    )


def _set_aside(checkpoint: Path) -> None:
    """Move a checkpoint out of NeMo's sight, under a name that is free; where it cannot be moved, it stays."""
    folder = checkpoint.parent.resolve().parent / ASIDE  # the same file system, so that a move copies nothing
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        number = 1
        while (target := folder / (checkpoint.name + (f".{number}" if number > 1 else ""))).exists():
            number += 1
        checkpoint.rename(target)
