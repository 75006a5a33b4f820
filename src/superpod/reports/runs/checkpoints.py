"""The checkpoints of a run or a folder: list them, choose the best, remove old ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from superpod.common.files import JsonObject
from superpod.errors import UserError
from superpod.planner.layout import PARALLEL_SIZES
from superpod.runtime.checkpoints import checkpoint_files, checkpoint_metadata, resume
from superpod.runtime.checkpoints.checkpoint_files import Problem
from superpod.runtime.checkpoints.checkpoints import (
    MARK,
    is_checkpoint,
    is_own_folder,
    leads_nowhere,
    marked_names,
    step_of,
)
from superpod.runtime.checkpoints.cross_checks import CrossCheck, cross_check
from superpod.runtime.runs.run_facts import last_of_each_step, read_metrics
from superpod.runtime.runs.run_folder import RunFolder
from superpod.weights.transfer import load


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint folder; `problems` are why it cannot be used."""

    path: Path
    step: int | None
    problems: list[Problem] = field(default_factory=list)
    verified: bool = False
    """its manifest is complete, and has a checksum of every file"""
    bytes: int = 0
    adapter: bool = False
    parameters: int = 0
    """number of weights"""
    optimizer: bool = False
    layout: dict[str, int] = field(default_factory=dict)
    val_loss: float | None = None
    newest: bool = False
    """its name ends in `-last`: the next save replaces it"""

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.path.name

    @property
    def whole(self) -> bool:
        """Whether it can be used."""
        return not self.problems

    @property
    def state(self) -> str:
        """One word for tables: verified, unverified (its shards may be of several saves) or damaged."""
        if self.problems:
            return "damaged"
        return "verified" if self.verified else "unverified"

    @property
    def resumes(self) -> bool:
        """Whether a training can go on from it; for that, a damaged context does not matter."""
        return not checkpoint_files.keeps_from_resuming(self.problems)


def list_checkpoints(path: Path) -> list[Checkpoint]:
    """The checkpoints at `path`, by step: a run folder, a folder of checkpoints, or one checkpoint.

    Raises:
        UserError: there is no checkpoint.
    """
    path = path.absolute()
    if not path.is_dir():
        raise UserError(f"{path} is no folder", "name a run folder, a folder of checkpoints, or a checkpoint")
    run = find_run(path)
    losses = _losses(run.path) if run else {}
    if (path / checkpoint_metadata.WEIGHTS).is_dir():
        return [_read(path, losses)]
    folder = run.checkpoints if run and run.path == path else path
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    marked = marked_names(entries)
    folders = [e for e in entries if is_own_folder(e) and _is_checkpoint(e, marked)]
    if not folders and folder == path:
        raise UserError(f"{path} holds no checkpoint", "name a run folder, a folder of checkpoints, or a checkpoint")
    checkpoints = [_read(folder, losses) for folder in folders]
    return sorted(checkpoints, key=lambda checkpoint: (checkpoint.step or 0, checkpoint.name))


def find_run(path: Path) -> RunFolder | None:
    """The run of which `path` is the folder, the folder of checkpoints, or a checkpoint."""
    path = path.absolute()
    runs = [RunFolder(home) for home in (path, *path.parents[:2]) if (home / "run.json").is_file()]
    return next((run for run in runs if run.path == path or run.checkpoints in (path, path.parent)), None)


def _is_checkpoint(folder: Path, marked: set[str]) -> bool:
    return is_checkpoint(folder) or folder.name in marked


def _read(path: Path, losses: dict[int, float]) -> Checkpoint:
    found = checkpoint_files.survey(path)
    problems = found.problems
    step = step_of(path.name)
    facts: JsonObject = {}
    try:
        load.base_of(path)
    except UserError as gone:
        problems.append(Problem(str(gone)))
    try:
        metadata = checkpoint_metadata.read(path)
        parameters = sum(tensor.numbers for tensor in metadata.model.values())
        facts = {"parameters": parameters, "optimizer": metadata.optimizer}
    except ValueError:
        pass
    return Checkpoint(
        path=path,
        step=step,
        problems=problems,
        verified=found.is_verified,
        bytes=checkpoint_files.bytes_of(path),
        adapter=(path / load.ADAPTER).is_file(),
        layout=_saved_layout(path),
        val_loss=losses.get(step) if step is not None else None,
        newest=path.name.endswith("-last"),
        **facts,
    )


def _saved_layout(checkpoint: Path) -> dict[str, int]:
    """The layout it was saved under (tp, pp, ..., ranks) according to `context/io.json`; {} if that is missing."""
    saved = checkpoint_files.saved_under(checkpoint)
    layout = {ours: saved[megatron] for ours, megatron in PARALLEL_SIZES.items() if megatron in saved}
    if "ranks" in saved:
        layout["ranks"] = saved["ranks"]
    return layout


def _losses(run: Path) -> dict[int, float]:
    """Validation loss by step; the last line of a step wins."""
    lines = last_of_each_step(read_metrics(run))
    return {line["step"]: line["val_loss"] for line in lines if line.get("val_loss") is not None}


def choose_best(checkpoints: Sequence[Checkpoint]) -> Checkpoint:
    """The intact checkpoint with the least validation loss; the newest where none was validated.

    Raises:
        UserError: none is intact.
    """
    intact = [checkpoint for checkpoint in checkpoints if checkpoint.whole]
    if not intact:
        raise UserError("no checkpoint is intact", "`recipes ckpt verify` says what each lacks")
    validated = [checkpoint for checkpoint in intact if checkpoint.val_loss is not None]
    if validated:
        # `-last` may be a copy of another one: prefer the one that the next save does not replace.
        return min(validated, key=lambda checkpoint: (checkpoint.val_loss, checkpoint.newest))
    return max(intact, key=lambda checkpoint: checkpoint.step or 0)


def choose_removable(
    checkpoints: Sequence[Checkpoint], keep: int, read: Callable[[Path], list[Problem]] = checkpoint_files.damages
) -> list[Checkpoint]:
    """The checkpoints to remove: all but the `keep` newest that a training can resume from, and the best one.

    Nothing is removed unless `keep` newer ones are known to be intact, nor anything that cannot be read at the moment.

    Args:
        checkpoints: those of one run.
        keep: how many of the newest stay.
        read: reads a checkpoint and returns what is wrong with it.

    Raises:
        UserError: fewer than one is to be kept.
    """
    if keep < 1:
        raise UserError(f"--keep {keep} would leave nothing to resume from", "--keep 1 leaves the newest")
    judged = {checkpoint.path: checkpoint for checkpoint in checkpoints}

    def is_intact(checkpoint: Checkpoint, wanted: Callable[[Checkpoint], bool]) -> bool:
        known = judged[checkpoint.path]
        if wanted(known):
            known = judged[checkpoint.path] = replace(known, problems=[*known.problems, *read(checkpoint.path)])
        return wanted(known)

    kept: list[Path] = []
    for checkpoint in sorted(checkpoints, key=lambda known: (known.step or 0, known.newest), reverse=True):
        if len(kept) < keep and is_intact(checkpoint, lambda known: known.resumes):
            kept.append(checkpoint.path)
    if not kept:
        return []  # a damaged checkpoint may be all that is left of a run
    while any(checkpoint.whole for checkpoint in judged.values()):
        favourite = choose_best(list(judged.values()))
        if favourite.path in kept or is_intact(favourite, lambda known: known.whole):
            kept.append(favourite.path)
            break
    known = [checkpoint for checkpoint in judged.values() if not checkpoint_files.is_unreadable(checkpoint.problems)]
    return [checkpoint for checkpoint in known if checkpoint.path not in kept]


def run_cross_check(checkpoint: Checkpoint, others: Sequence[Checkpoint]) -> CrossCheck:
    """What tells that a checkpoint without a complete manifest holds files of several saves."""
    if checkpoint.verified or not checkpoint.resumes:
        return CrossCheck([])
    return cross_check(checkpoint.path, [other.path for other in others if other != checkpoint])


def list_set_aside(where: Path) -> list[Path]:
    """The damaged checkpoints that attempts of the run at `where` have moved away, by name; none where it is no run."""
    run = find_run(where)
    folder = run.checkpoints.resolve().parent / resume.ASIDE if run else None
    return sorted(folder.iterdir()) if folder and folder.is_dir() else []


def describe_next_resume(where: Path) -> str:
    """In words, what a resume of the run at `where` would take, and what it would set aside; '' for no run.

    It reads what a resume would read.
    """
    run = find_run(where)
    if run is None:
        return ""
    try:
        decided = resume.decide(run)
    except resume.NoIntactCheckpointError as none:
        return str(none)
    return f"the next attempt {decided.words}"


def remove(checkpoint: Checkpoint) -> None:
    """Remove a checkpoint; of one that lies elsewhere, the link to it.

    It bears NeMo's unfinished mark meanwhile, so that no run resumes from the rest of it.
    """
    mark = checkpoint.path.with_name(f"{checkpoint.name}{MARK}")
    mark.touch()
    if checkpoint.path.is_symlink():
        checkpoint.path.unlink()
    else:
        shutil.rmtree(checkpoint.path)
    for link in checkpoint.path.parent.iterdir():
        if link.is_symlink() and not link.exists() and not leads_nowhere(link):
            link.unlink()
    mark.unlink()


def as_json(checkpoint: Checkpoint) -> JsonObject:
    """A checkpoint as JSON, for programs."""
    kept = {**vars(checkpoint), "path": str(checkpoint.path), "whole": checkpoint.whole}
    return json.loads(json.dumps(kept))
