"""Lists the checkpoints of a run or a folder, selects the best one, and removes old ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from superpod.common.json_files import JsonObject
from superpod.errors import UserError
from superpod.planner.layout import PARALLEL_SIZES
from superpod.runtime.checkpoints import checkpoint_files, checkpoint_metadata, resume
from superpod.runtime.checkpoints.checkpoint_files import Problem
from superpod.runtime.checkpoints.checkpoint_folder import (
    MARK,
    is_checkpoint,
    is_dangling,
    is_own_folder,
    marked_names,
    step_of,
)
from superpod.runtime.checkpoints.cross_checks import CrossCheck, cross_check
from superpod.runtime.runs.run_facts import last_of_each_step, read_metrics
from superpod.runtime.runs.run_folder import RunFolder
from superpod.weights.transfer import load


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder and its state."""

    path: Path
    step: int | None
    problems: list[Problem] = field(default_factory=list)
    """why it cannot be used"""
    verified: bool = False
    """whether its manifest is complete and has a checksum for every file"""
    bytes: int = 0
    adapter: bool = False
    parameters: int = 0
    optimizer: bool = False
    layout: dict[str, int] = field(default_factory=dict)
    val_loss: float | None = None
    newest: bool = False
    """whether its name ends in `-last`, so that the next save replaces it"""

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.name

    @property
    def is_intact(self) -> bool:
        """Whether no problem was found."""
        return not self.problems

    @property
    def state(self) -> str:
        """`verified`, `unverified` (shards may come from different saves) or `damaged`."""
        if self.problems:
            return "damaged"
        return "verified" if self.verified else "unverified"

    @property
    def can_resume(self) -> bool:
        """Whether training can resume from it. Its context folder may be damaged."""
        return not checkpoint_files.resume_blockers(self.problems)


def list_checkpoints(path: Path) -> list[Checkpoint]:
    """Return the checkpoints at `path` by step. `path` is a run folder, a folder of checkpoints, or a checkpoint.

    Raises:
        UserError: `path` contains no checkpoint.
    """
    path = path.absolute()
    expected = "specify a run folder, a folder of checkpoints, or a checkpoint"
    if not path.is_dir():
        raise UserError(f"{path} is not a folder", expected)
    run = find_run(path)
    lines = last_of_each_step(read_metrics(run.path)) if run else []
    losses = {line["step"]: line["val_loss"] for line in lines if line.get("val_loss") is not None}
    if (path / checkpoint_metadata.WEIGHTS).is_dir():
        return [_read_checkpoint(path, losses)]
    folder = run.checkpoints if run and run.path == path else path
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    marked_folders = marked_names(entries)
    folders = [e for e in entries if is_own_folder(e) and (is_checkpoint(e) or e.name in marked_folders)]
    if not folders and folder == path:
        raise UserError(f"{path} contains no checkpoint", expected)
    checkpoints = [_read_checkpoint(folder, losses) for folder in folders]
    return sorted(checkpoints, key=lambda checkpoint: (checkpoint.step or 0, checkpoint.name))


def find_run(path: Path) -> RunFolder | None:
    """Return the run whose run folder, folder of checkpoints or checkpoint is `path`; None if there is none."""
    path = path.absolute()
    runs = [RunFolder(home) for home in (path, *path.parents[:2]) if (home / "run.json").is_file()]
    return next((run for run in runs if run.path == path or run.checkpoints in (path, path.parent)), None)


def _read_checkpoint(path: Path, losses: dict[int, float]) -> Checkpoint:
    """Return a checkpoint, without reading its weights. `losses` are validation losses by step."""
    survey = checkpoint_files.check_sizes(path)
    problems = survey.problems
    step = step_of(path.name)
    facts: JsonObject = {}
    try:
        load.find_base_checkpoint(path)
    except UserError as error:
        problems.append(Problem(str(error)))
    try:
        metadata = checkpoint_metadata.read(path)
        parameters = sum(tensor.elements for tensor in metadata.model.values())
        facts = {"parameters": parameters, "optimizer": metadata.optimizer}
    except ValueError:
        pass  # `survey` lists the damage
    return Checkpoint(
        path=path,
        step=step,
        problems=problems,
        verified=survey.is_verified,
        bytes=checkpoint_files.total_bytes(path),
        adapter=(path / load.ADAPTER).is_file(),
        layout=_read_layout(path),
        val_loss=losses.get(step) if step is not None else None,
        newest=path.name.endswith("-last"),
        **facts,
    )


def _read_layout(checkpoint: Path) -> dict[str, int]:
    """Return the layout with which a checkpoint was saved, from `context/io.json`; {} if the file is missing."""
    layout_facts = checkpoint_files.saved_layout(checkpoint)
    layout = {ours: layout_facts[megatron] for ours, megatron in PARALLEL_SIZES.items() if megatron in layout_facts}
    if "ranks" in layout_facts:
        layout["ranks"] = layout_facts["ranks"]
    return layout


def choose_best(checkpoints: Sequence[Checkpoint]) -> Checkpoint:
    """Return the intact checkpoint with the lowest validation loss, or the latest one if none was validated.

    Raises:
        UserError: no checkpoint is intact.
    """
    intact_checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.is_intact]
    if not intact_checkpoints:
        raise UserError("no checkpoint is intact", "`recipes ckpt verify` lists the problems of each")
    validated_checkpoints = [checkpoint for checkpoint in intact_checkpoints if checkpoint.val_loss is not None]
    if validated_checkpoints:
        # `-last` may be a copy of another one: prefer the one that the next save does not replace.
        return min(validated_checkpoints, key=lambda checkpoint: (checkpoint.val_loss, checkpoint.newest))
    return max(intact_checkpoints, key=lambda checkpoint: checkpoint.step or 0)


def choose_removable(checkpoints: Sequence[Checkpoint], keep: int) -> list[Checkpoint]:
    """Return the checkpoints of a run to remove: all except the best and the `keep` newest that can be resumed.

    All bytes of the kept checkpoints are read, to verify that they are intact. Unreadable checkpoints are kept, too.

    Raises:
        UserError: `keep` is below 1.
    """
    if keep < 1:
        raise UserError(f"--keep {keep} would leave nothing to resume from", "--keep 1 keeps the newest")
    by_path = {checkpoint.path: checkpoint for checkpoint in checkpoints}

    def read_and_check(checkpoint: Checkpoint, is_usable: Callable[[Checkpoint], bool]) -> bool:
        """Return whether a checkpoint is usable. Its files are read only if no known problem rules it out."""
        latest = by_path[checkpoint.path]
        if is_usable(latest):
            problems = [*latest.problems, *checkpoint_files.check_all_bytes(checkpoint.path)]
            latest = by_path[checkpoint.path] = replace(latest, problems=problems)
        return is_usable(latest)

    kept: list[Path] = []
    for checkpoint in sorted(checkpoints, key=lambda one: (one.step or 0, one.newest), reverse=True):
        if len(kept) < keep and read_and_check(checkpoint, lambda one: one.can_resume):
            kept.append(checkpoint.path)
    if not kept:
        return []  # a corrupt checkpoint may be all that is left of a run

    # If reading shows that the best is corrupt, the next best is kept.
    while any(checkpoint.is_intact for checkpoint in by_path.values()):
        best = choose_best(list(by_path.values()))
        if best.path in kept or read_and_check(best, lambda one: one.is_intact):
            kept.append(best.path)
            break
    readable = [
        checkpoint for checkpoint in by_path.values() if not checkpoint_files.is_unreadable(checkpoint.problems)
    ]
    return [checkpoint for checkpoint in readable if checkpoint.path not in kept]


def run_cross_check(checkpoint: Checkpoint, others: Sequence[Checkpoint]) -> CrossCheck:
    """Check whether an unverified checkpoint contains files from different saves, by comparison with `others`."""
    if checkpoint.verified or not checkpoint.can_resume:
        return CrossCheck([])
    return cross_check(checkpoint.path, [other.path for other in others if other != checkpoint])


def list_set_aside(path: Path) -> list[Path]:
    """Return the sorted corrupt checkpoints that the run at `path` has set aside; [] if `path` is not of a run."""
    run = find_run(path)
    folder = run.checkpoints.resolve().parent / resume.DAMAGED if run else None
    return sorted(folder.iterdir()) if folder and folder.is_dir() else []


def describe_next_resume(path: Path) -> str:
    """Describe the checkpoint from which the run at `path` would resume; "" if `path` is not of a run.

    The same files are read as at a resume.
    """
    run = find_run(path)
    if run is None:
        return ""
    try:
        decision = resume.decide(run)
    except resume.NoIntactCheckpointError as error:
        return str(error)
    return f"the next attempt {decision.message}"


def remove_checkpoint(checkpoint: Checkpoint) -> None:
    """Remove a checkpoint; of a symbolic link, only the link.

    During the removal, it has the marker that NeMo sets during a save, so that no run resumes from it.
    """
    mark = checkpoint.path.with_name(f"{checkpoint.name}{MARK}")
    mark.touch()
    if checkpoint.path.is_symlink():
        checkpoint.path.unlink()
    else:
        shutil.rmtree(checkpoint.path)
    for link in checkpoint.path.parent.iterdir():
        if link.is_symlink() and not link.exists() and not is_dangling(link):
            link.unlink()
    mark.unlink()


def as_json(checkpoint: Checkpoint) -> JsonObject:
    """Return a checkpoint as a JSON object."""
    fields = {**vars(checkpoint), "path": str(checkpoint.path), "whole": checkpoint.is_intact}
    return json.loads(json.dumps(fields))
