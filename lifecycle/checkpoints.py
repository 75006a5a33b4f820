"""The checkpoints of a run or a folder: what is there, what can be used, what can go."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from superpod.errors import UserError
from superpod.lifecycle import checkpoint_metadata
from superpod.node.checkpoints import MARK, marked_names, step_of
from superpod.node.files import is_number, read_lines
from superpod.node.run_folder import RunFolder
from superpod.recipes.weights import load


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint folder; `problems` are why it cannot be used."""

    path: Path
    step: int | None
    problems: list[str] = field(default_factory=list)
    bytes: int = 0
    adapter: bool = False
    parameters: int = 0
    """Of the weights that it holds."""
    optimizer: bool = False
    layout: dict[str, int] = field(default_factory=dict)
    val_loss: float | None = None
    newest: bool = False
    """NeMo resumes from it."""

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.path.name

    @property
    def whole(self) -> bool:
        """Whether it can be used."""
        return not self.problems


def found(path: Path) -> list[Checkpoint]:
    """The checkpoints at `path`, by step: a run folder, a folder of checkpoints, or one checkpoint.

    Raises:
        UserError: there is nothing of the kind.
    """
    path = path.absolute()
    if not path.is_dir():
        raise UserError(f"{path} is no folder", "name a run folder, a folder of checkpoints, or a checkpoint")
    run = run_of(path)
    losses = _losses(run.path) if run else {}
    if (path / checkpoint_metadata.WEIGHTS).is_dir():
        return [_read(path, losses)]
    folder = run.checkpoints if run and run.path == path else path
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    marked = marked_names(entries)
    mine = [each for each in entries if each.is_dir() and not each.is_symlink() and _is_one(each, marked)]
    if not mine and folder == path:
        raise UserError(f"{path} holds no checkpoint", "name a run folder, a folder of checkpoints, or a checkpoint")
    return sorted((_read(each, losses) for each in mine), key=lambda each: (each.step or 0, each.name))


def run_of(path: Path) -> RunFolder | None:
    """The run that `path` is the folder, the folder of checkpoints, or a checkpoint of."""
    path = path.absolute()
    runs = [RunFolder(home) for home in (path, *path.parents[:2]) if (home / "run.json").is_file()]
    return next((run for run in runs if run.path == path or run.checkpoints in (path, path.parent)), None)


def _is_one(folder: Path, marked: set[str]) -> bool:
    return (folder / checkpoint_metadata.WEIGHTS).is_dir() or (folder / "context").is_dir() or folder.name in marked


def _read(path: Path, losses: dict[int, float]) -> Checkpoint:
    problems = checkpoint_metadata.problems(path)
    step = step_of(path.name)
    facts: dict[str, Any] = {}
    try:
        load.base_of(path)
    except UserError as gone:
        problems.append(str(gone))
    try:
        held = checkpoint_metadata.read(path)
        facts = {"parameters": sum(each.numbers for each in held.model.values()), "optimizer": held.optimizer}
    except ValueError:
        pass
    return Checkpoint(
        path=path,
        step=step,
        problems=problems,
        bytes=_bytes(path),
        adapter=(path / load.ADAPTER).is_file(),
        layout=checkpoint_metadata.layout(path),
        val_loss=losses.get(step) if step is not None else None,
        newest=path.name.endswith("-last"),
        **facts,
    )


def _bytes(folder: Path) -> int:
    """Of all files; a run that goes on removes some meanwhile."""
    files = [os.path.join(at, name) for at, _, names in os.walk(folder) for name in names]
    return sum(checkpoint_metadata.size(Path(file)) or 0 for file in files)


def _losses(run: Path) -> dict[int, float]:
    """Validation loss by step; the last line of a step wins."""
    lines = {line["step"]: line.get("val_loss") for line in read_lines(run / "metrics.jsonl") if "step" in line}
    return {step: loss for step, loss in lines.items() if is_number(loss)}


def best(checkpoints: Sequence[Checkpoint]) -> Checkpoint:
    """The whole checkpoint with the least validation loss; the newest where none was validated.

    Raises:
        UserError: none is whole.
    """
    whole = [each for each in checkpoints if each.whole]
    if not whole:
        raise UserError("no checkpoint is whole", "`recipes ckpt verify` says what each lacks")
    judged = [each for each in whole if each.val_loss is not None]
    return (
        min(judged, key=lambda each: (each.val_loss, each.newest)) if judged else max(whole, key=lambda e: e.step or 0)
    )


def spare(checkpoints: Sequence[Checkpoint], keep: int) -> list[Checkpoint]:
    """What can go so that the `keep` newest whole ones stay, and the best: the older ones, and all that is not whole.

    Raises:
        UserError: fewer than one is to be kept.
    """
    if keep < 1:
        raise UserError(f"--keep {keep} would leave nothing to go on with", "--keep 1 leaves the newest")
    whole = [each for each in checkpoints if each.whole]
    kept = {each.path for each in sorted(whole, key=lambda each: (each.step or 0, each.newest))[-keep:]}
    kept |= {best(whole).path} if whole else set()
    if not whole:
        return []  # half of something may be all there is
    return [each for each in checkpoints if each.path not in kept]


def remove(checkpoint: Checkpoint) -> None:
    """Remove a checkpoint, marked as NeMo marks one meanwhile, so that a half-removed one is never resumed from."""
    mark = checkpoint.path.with_name(f"{checkpoint.name}{MARK}")
    mark.touch()
    shutil.rmtree(checkpoint.path)
    for link in checkpoint.path.parent.iterdir():
        if link.is_symlink() and not link.exists():
            link.unlink()
    mark.unlink()


def facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """For programs."""
    kept = {**vars(checkpoint), "path": str(checkpoint.path), "whole": checkpoint.whole}
    return json.loads(json.dumps(kept))
