"""Before the ranks start, select the checkpoint from which an attempt resumes: the newest intact one.

NeMo itself resumes only from `*-last`, a link to the newest checkpoint. If this checkpoint is corrupt, every start
fails; if the link is dangling, NeMo silently trains from scratch. This module selects the newest intact checkpoint,
whatever its name. Newer, corrupt checkpoints are moved to `RUN/damaged`, never deleted, and the lost steps are
reported. If there are checkpoints but none is intact, the run stops. NeMo finds only the selected checkpoint, linked in
`attempts/NNN/resume`. Standard library only.
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

from superpod.common.json_files import JsonObject, append_line, read_lines
from superpod.errors import UserError
from superpod.runtime.checkpoints import checkpoint_files, training_records
from superpod.runtime.checkpoints.checkpoint_files import Problem
from superpod.runtime.checkpoints.checkpoint_folder import MARK, candidates, discard_unfinished, samples_of, step_of
from superpod.runtime.checkpoints.cross_checks import CrossCheck, cross_check
from superpod.runtime.runs.run_folder import Attempt, RunFolder, as_user_errors
from superpod.runtime.runs.run_state import State

FOLDER = "resume"
"""`attempts/NNN/resume`: the folder with a link to the selected checkpoint; empty if training starts at step 1."""

DAMAGED = "damaged"
"""`RUN/damaged`: the folder to which corrupt checkpoints are moved."""

SECOND_LOOK_S = 30.0
"""Default seconds before a checkpoint with problems is checked again, since file system errors may be temporary."""

SAVED = "saved.jsonl"
"""`RUN/saved.jsonl`: one line per saved checkpoint, and one per checkpoint that was lost later."""


class NoIntactCheckpointError(UserError):
    """No checkpoint of the run is intact. The run stops, since a start at step 1 would discard the training."""


@dataclass(frozen=True)
class CorruptCheckpoint:
    """A corrupt checkpoint that is newer than the selected one."""

    path: Path
    why: str
    unreadable: bool = False
    """whether reading failed twice: its content is unknown, so it is not moved, and the next attempt checks it"""

    @property
    def step(self) -> int:
        """Number of completed steps, from its name; 0 = unknown."""
        return step_of(self.path.name) or 0


Examine = Callable[[Path], checkpoint_files.Findings]
"""Checks the files of a checkpoint whose folders and metadata files are intact."""


@dataclass(frozen=True)
class Resume:
    """The checkpoint from which an attempt resumes, and newer checkpoints that cannot be used."""

    checkpoint: Path | None
    """None = no checkpoint yet: the attempt starts at step 1"""
    damaged: tuple[CorruptCheckpoint, ...] = ()
    """newest first"""
    gone: int = 0
    """step of the newest checkpoint that was saved but no longer exists; 0 = none is missing"""
    is_verified: bool = True
    """whether the manifest has the checksum of every file"""
    doubt: str = ""
    """why the checkpoint may contain files of another save; '' = no evidence"""

    @property
    def step(self) -> int:
        """Number of completed steps at the checkpoint; 0 if there is none, or its name does not contain the step."""
        return (step_of(self.checkpoint.name) or 0) if self.checkpoint else 0

    @property
    def lost_steps(self) -> int:
        """Number of steps to train again, since only corrupt or missing checkpoints contained them."""
        return max(0, self.gone - self.step, *(damaged.step - self.step for damaged in self.damaged))

    @property
    def message(self) -> str:
        """The decision in one line, for the log and `recipes status`."""
        if not self.checkpoint:
            return "starts at step 1: no checkpoint yet"
        samples = samples_of(self.checkpoint.name)
        position = f", {samples} samples into its data" if samples is not None else ""
        message = f"resumes from step {self.step}{position} ({self.checkpoint.name}, {self._verification})"
        for damaged in self.damaged:
            outcome = "cannot be read and is kept" if damaged.unreadable else f"is corrupt and was moved to {DAMAGED}/"
            message += f"; {damaged.path.name} {outcome}: {damaged.why}"
        if self.gone > max(self.step, *(damaged.step for damaged in self.damaged), 0):
            message += f"; the checkpoint saved at step {self.gone} no longer exists"
        if self.lost_steps:
            lost = "1 step is" if self.lost_steps == 1 else f"{self.lost_steps} steps are"
            message += f"; {lost} lost and will be trained again"
        return message

    @property
    def _verification(self) -> str:
        if self.is_verified:
            return "verified"
        return f"unverified: {self.doubt or 'it has no complete manifest'}"

    def facts(self) -> JsonObject:
        """Return the decision as the JSON object that result.json stores under the key `resume`."""
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
            "words": self.message,
        }


def decide(
    run: RunFolder,
    examine: Examine = checkpoint_files.check_samples,
    pause: Callable[[], object] = lambda: None,
) -> Resume:
    """Select the checkpoint from which the next attempt resumes, without changing a file.

    The caller holds the lock of the run. `examine` checks the files of a checkpoint, by default their sizes and samples
    of their bytes; `pause` waits before a second check.

    Raises:
        NoIntactCheckpointError: the run has had checkpoints or trained steps, but no checkpoint is intact.
        UserError: the checkpoints cannot be listed, or those that are not corrupt cannot be read at present.
    """
    with as_user_errors(run.checkpoints):
        resume = newest_usable(run.checkpoints, examine, pause)
        missing_step, lost_training = _newest_known(run), ""
        if not (resume.checkpoint or resume.damaged or missing_step):
            lost_training = training_records.lost_training(run)
    unreadable = [damaged for damaged in resume.damaged if damaged.unreadable]
    if resume.checkpoint is None and unreadable:
        raise UserError(
            f"{run.path} cannot be resumed now: {unreadable[0].path.name}: {unreadable[0].why}",
            "nothing was changed; check the file system and this node, then resume the run",
        )
    if resume.checkpoint is None and (resume.damaged or missing_step or lost_training):
        _refuse_resume(run, resume.damaged, missing_step, lost_training)
    return replace(resume, gone=missing_step) if missing_step > resume.step else resume


def newest_usable(
    checkpoints: Path,
    examine: Examine = checkpoint_files.check_samples,
    pause: Callable[[], object] = lambda: None,
) -> Resume:
    """Select the newest checkpoint in a folder from which training can resume.

    A checkpoint that NeMo has marked as unfinished is used if it is complete: its save was killed between the last
    write and the removal of the mark. If it is incomplete, it does not count as corrupt. A problem counts only if a
    second check, after `pause` and on this node, finds it too. A doubtful checkpoint is used only if there is no other.
    Raises OSError if the folder cannot be listed.
    """
    damaged, doubtful_decision = [], None
    folders = candidates(checkpoints)
    for checkpoint in folders:
        problems, is_verified = _problems(checkpoint, examine, pause)
        doubt = ""
        if not problems and not is_verified:
            cross_check = _cross_check(checkpoint, folders)
            problems, doubt = cross_check.problems, cross_check.doubt
        if problems:
            unreadable = checkpoint_files.is_unreadable(problems)
            if unreadable or not checkpoint.with_name(f"{checkpoint.name}{MARK}").exists():
                damaged.append(CorruptCheckpoint(checkpoint, "; ".join(map(str, problems[:3])), unreadable))
            continue
        decision = Resume(checkpoint, tuple(damaged), is_verified=is_verified, doubt=doubt)
        if not doubt:
            return decision if doubtful_decision is None else _replace_doubtful(doubtful_decision, decision)
        doubtful_decision = doubtful_decision or decision
    return doubtful_decision or Resume(None, tuple(damaged))


def _replace_doubtful(candidate: Resume, decision: Resume) -> Resume:
    """Return `decision`, for an older checkpoint, with the newer, doubtful one of `candidate` added as corrupt."""
    if candidate.checkpoint is None or candidate.step == decision.step:  # a second copy of the same step is kept
        return decision
    damaged = (*decision.damaged, CorruptCheckpoint(candidate.checkpoint, candidate.doubt))
    return replace(decision, damaged=tuple(sorted(damaged, key=lambda d: d.step, reverse=True)))


def _cross_check(checkpoint: Path, folders: list[Path]) -> CrossCheck:
    try:
        return cross_check(checkpoint, [folder for folder in folders if folder != checkpoint])
    except (OSError, ValueError) as error:
        return CrossCheck([Problem.unreadable(error)])


def _problems(checkpoint: Path, examine: Examine, pause: Callable[[], object]) -> tuple[list[Problem], bool]:
    """Return the problems that prevent resuming, found by two checks, and whether the checkpoint is verified."""
    if _structure_problems(checkpoint):
        pause()
        problems = _structure_problems(checkpoint)
        if problems:
            return problems, False
    try:
        found = examine(checkpoint)
        problems = checkpoint_files.resume_blockers(found.problems)
        if problems:
            pause()
            found = checkpoint_files.check_samples(checkpoint, files=[problem.file for problem in problems])
    except (OSError, ValueError) as error:
        return [Problem.unreadable(error)], False
    return checkpoint_files.resume_blockers(found.problems), found.is_verified


def _structure_problems(checkpoint: Path) -> list[Problem]:
    return checkpoint_files.resume_blockers(checkpoint_files.structure_problems(checkpoint))


def decide_by_sizes(run: RunFolder) -> Resume:
    """Select a checkpoint like `decide`, and with the same errors, but check only names and sizes of files.

    The next attempt resumes from this checkpoint unless its bytes turn out to be corrupt.
    """
    return decide(run, functools.partial(checkpoint_files.check_sizes, marked=False))


def apply_decision(run: RunFolder, attempt: Attempt, resume: Resume) -> None:
    """Move corrupt checkpoints, remove unfinished ones, link the selected one for NeMo, and record the decision.

    The caller holds the lock of the run and has not started the ranks yet. Raises UserError if a write fails.
    """
    with as_user_errors(run.path):
        for damaged in resume.damaged:
            if not damaged.unreadable:
                _move_damaged(damaged.path)
                append_line(run.path / SAVED, {"t": time.time(), "lost": damaged.why, **_name_and_step(damaged.path)})
        unknown = {damaged.path.name: damaged.step for damaged in resume.damaged if damaged.unreadable}
        if resume.gone > max(resume.step, *unknown.values(), 0):
            append_line(run.path / SAVED, {"t": time.time(), "lost": "gone", "after": resume.step})
        if resume.checkpoint:
            # The checkpoint is complete, but NeMo would remove a marked one when it starts.
            resume.checkpoint.with_name(f"{resume.checkpoint.name}{MARK}").unlink(missing_ok=True)
        # Unreadable checkpoints stay: their content is unknown, and the next attempt checks them again.
        discard_unfinished(run.checkpoints, but=unknown)
        folder = attempt.path / FOLDER
        folder.mkdir(exist_ok=True)
        if resume.checkpoint:  # NeMo searches for a folder with this suffix
            link = folder / f"{resume.checkpoint.name.removesuffix('-last')}-last"
            link.symlink_to(os.path.relpath(resume.checkpoint, folder))  # relative, since a run folder may be moved
    attempt.mark(State.RUNNING, resume=resume.facts())


def record_saved(run: Path, checkpoint: Path) -> None:
    """Add a line for a complete checkpoint to SAVED. Raises OSError."""
    append_line(run / SAVED, {"t": time.time(), **_name_and_step(checkpoint)})


def _name_and_step(checkpoint: Path) -> JsonObject:
    return {"checkpoint": checkpoint.name, "step": step_of(checkpoint.name) or 0}


def _newest_known(run: RunFolder) -> int:
    """Return the step of the newest checkpoint that was saved and is not recorded as lost; 0 if there is none.

    The sources are SAVED, the last attempt's result, and NeMo's dangling links.
    """
    known_steps: dict[str, int] = {}
    for line in read_lines(run.path / SAVED):
        name, step = str(line.get("checkpoint", "")), line.get("step")
        if "after" in line:
            known_steps = {name: step for name, step in known_steps.items() if step <= int(line["after"])}
        elif "lost" in line:
            known_steps.pop(name, None)
        elif isinstance(step, int):
            known_steps[name] = step
    newest_first = (attempt.result for attempt in reversed(training_records.attempts_since_reset(run)))
    last = next((r for r in newest_first if "ended" in r or "resume" in r), {})  # excludes the attempt that is starting
    decision = last["resume"] if isinstance(last.get("resume"), dict) else {}
    results = [last.get("checkpoint"), last.get("before"), decision.get("step")]
    entries = run.checkpoints.iterdir() if run.checkpoints.is_dir() else ()
    linked_steps = [step_of(entry.name) or 0 for entry in entries if entry.is_symlink() and not entry.exists()]
    return max([0, *known_steps.values(), *(step for step in results if isinstance(step, int)), *linked_steps])


def _refuse_resume(
    run: RunFolder, corrupt_checkpoints: Sequence[CorruptCheckpoint], missing_step: int, lost_training: str
) -> None:
    """Raise NoIntactCheckpointError with the problems of the two newest checkpoints and a hint."""
    problems = [f"{damaged.path.name}: {damaged.why}" for damaged in corrupt_checkpoints]
    if problems:
        more_text = f"; and {len(problems) - 2} more" if len(problems) > 2 else ""
        problem = f"none of its {len(problems)} checkpoints is intact: {'; '.join(problems[:2])}{more_text}"
    elif missing_step:
        problem = f"its checkpoint at step {missing_step} no longer exists, and there is no other"
    else:
        problem = f"{lost_training}, but {run.checkpoints} contains no checkpoint"
    raise NoIntactCheckpointError(
        f"{run.path} cannot be resumed: {problem}",
        f"nothing was changed; copy an intact checkpoint to {run.checkpoints} (`recipes ckpt verify` checks it), "
        f"restart at step 1 with `recipes ckpt reset {shlex.quote(str(run.path))}`, or start a new run",
    )


def _move_damaged(checkpoint: Path) -> None:
    """Move a checkpoint to `RUN/damaged` under an unused name. If that fails, the checkpoint stays."""
    folder = checkpoint.parent.resolve().parent / DAMAGED  # on the same file system, so that nothing is copied
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        target, number = folder / checkpoint.name, 1
        while target.exists():
            number += 1
            target = folder / f"{checkpoint.name}.{number}"
        checkpoint.rename(target)
