"""Telling whole checkpoints from half-written ones, by the file system alone."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from .files import read_json

MARK = "-unfinished"  # NeMo's ModelCheckpoint.UNFINISHED_CHECKPOINT_SUFFIX


def discard_unfinished(checkpoints: Path) -> list[Path]:
    """Remove the checkpoints that no attempt can resume from, and their markers; returns what was removed.

    NeMo puts `{name}-unfinished` beside a checkpoint while it saves or deletes it, and its AutoResume refuses to start
    when every `*-last` is marked. Half-written folders without a marker go too, and links to what is gone. Call it
    while no attempt runs. Raises OSError.
    """
    entries = sorted(checkpoints.iterdir()) if checkpoints.is_dir() else []
    markers = [entry for entry in entries if entry.name.endswith(MARK) and entry.is_file()]
    marked = marked_names(entries)
    half = [e for e in entries if e not in markers and (_stem(e) in marked or is_half(e))]
    for entry in half:
        _remove(entry)
    dangling = [entry for entry in entries if entry.is_symlink() and not entry.exists() and entry not in half]
    for entry in [*dangling, *markers]:  # markers last: when killed in between, what is left is still marked
        _remove(entry)
    return [*half, *dangling, *markers]


def marked_names(entries: Iterable[Path]) -> set[str]:
    """The checkpoints among the entries of a folder that are marked as unfinished."""
    return {entry.name.removesuffix(MARK) for entry in entries if entry.name.endswith(MARK) and entry.is_file()}


def step_of(name: str) -> int | None:
    """Steps done at a checkpoint, which NeMo names after the index of its last step, from 0 on; None: no such name."""
    match = re.search(r"step=(\d+)", name)
    return int(match[1]) + 1 if match else None


def is_half(folder: Path) -> bool:
    """True for a checkpoint folder whose save never came to its end.

    Megatron writes `weights/common.pt` first and `weights/metadata.json` last; NeMo with `fsdp_dtensor` writes
    `.metadata`, then `common.pt`, into the folder itself. Hugging Face folders, and folders that hold neither weights
    nor a context, are somebody's own and never half; an empty folder is.
    """
    if not folder.is_dir() or folder.is_symlink():
        return False
    names = {entry.name for entry in folder.iterdir()}
    if names & {"hf_weights", "hf_adapter"} or {".metadata", "common.pt"} <= names:
        return False
    if names and not names & {"weights", "context"}:
        return False
    weights = folder / "weights"
    return not (read_json(weights / "metadata.json") and (weights / "common.pt").is_file())


def _stem(entry: Path) -> str:
    """The name under which NeMo marks a checkpoint file or folder."""
    return entry.name.removesuffix(".ckpt").removesuffix("-EMA")


def _remove(entry: Path) -> None:
    """Remove a file, a link or a folder."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)
