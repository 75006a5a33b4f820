"""The folders among a run's checkpoints: which are checkpoints, of which step, and which are debris of a save."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

from . import manifest
from .checkpoint_metadata import WEIGHTS
from .files import read_json

MARK = "-unfinished"  # NeMo's ModelCheckpoint.UNFINISHED_CHECKPOINT_SUFFIX
HUGGING_FACE = {"hf_weights", "hf_adapter"}
"""A folder with one of these is an export, and nothing to resume from."""


def candidates(checkpoints: Path) -> list[Path]:
    """The folders that are checkpoints, or were meant to be, newest first: by their steps, then by their age.

    Links to elsewhere count, also to what is not there: such a checkpoint is missing.
    Raises OSError when the folder cannot be listed.
    """
    entries = sorted(checkpoints.iterdir()) if checkpoints.is_dir() else []
    folders = [e for e in entries if (is_own_folder(e) or leads_nowhere(e)) and is_checkpoint(e)]
    return sorted(folders, key=lambda folder: (step_of(folder.name) or 0, _age_key(folder)), reverse=True)


def is_own_folder(entry: Path) -> bool:
    """True for a folder, and for a link to one that lies elsewhere: its user has moved it, or begins with it.

    NeMo's own links (`*-last`) lead to a neighbour, which counts itself. A link to nothing is no folder.
    Raises OSError.
    """
    try:
        facts = os.stat(entry)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise
    return stat.S_ISDIR(facts.st_mode) and not (entry.is_symlink() and _leads_to_neighbour(entry))


def leads_nowhere(entry: Path) -> bool:
    """True for a link to elsewhere where nothing is: a checkpoint that is missing, and may come back."""
    return entry.is_symlink() and not entry.exists() and not _leads_to_neighbour(entry)


def _leads_to_neighbour(link: Path) -> bool:
    target = link.parent / os.readlink(link)  # one step: a neighbour may be a link to elsewhere
    return os.path.realpath(target.parent) == os.path.realpath(link.parent)


def discard_unfinished(checkpoints: Path, *, complete_too: bool = True, but: Collection[str] = ()) -> list[Path]:
    """Remove what a save or a removal has left half done, by NeMo's own marks; returns what was removed.

    NeMo puts `{name}-unfinished` beside a checkpoint while it saves or deletes it, and removes what is marked at its
    next start. Empty folders and links to neighbours that are gone go too. A folder that is damaged without a mark
    stays: `node/resume.py` sets it aside. Call it while no attempt runs. Without `complete_too`, a marked one that may
    have all its bytes is left, for `node/resume.py` to judge; `but` names others that are left. Raises OSError.
    """
    entries = sorted(checkpoints.iterdir()) if checkpoints.is_dir() else []
    marked = marked_names(entries) - set(but)
    if not complete_too:
        marked = {name for name in marked if not (checkpoints / name).is_dir() or is_incomplete(checkpoints / name)}
    markers = [entry for entry in entries if entry.name.endswith(MARK) and entry.name.removesuffix(MARK) in marked]
    markers = [entry for entry in markers if entry.is_file()]
    half = [e for e in entries if e not in markers and (_stem(e) in marked or _is_leftover(e))]
    for entry in half:
        _remove(entry)
    dangling = [e for e in entries if e.is_symlink() and not e.exists() and e not in half and not leads_nowhere(e)]
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


def samples_of(name: str) -> int | None:
    """Samples read from the data up to a checkpoint, where its name says so (`consumed_samples=480.0`)."""
    match = re.search(r"consumed_samples=(\d+)", name)
    return int(match[1]) if match else None


def is_checkpoint(folder: Path) -> bool:
    """True for a folder that NeMo made for a checkpoint: by what it holds, or by a step in its name."""
    named = step_of(folder.name) is not None
    try:
        names = {entry.name for entry in folder.iterdir()}
    except OSError:
        return named
    if names & HUGGING_FACE:
        return False
    return named or bool(names & {WEIGHTS, "context"}) or {".metadata", "common.pt"} <= names


def is_incomplete(folder: Path) -> bool:
    """True for a checkpoint folder whose save never came to its end.

    Megatron writes `weights/common.pt` first and `weights/metadata.json` last; NeMo with `fsdp_dtensor` writes
    `.metadata`, then `common.pt`, into the folder itself. Hugging Face folders, and folders that hold neither weights
    nor a context, are somebody's own and never half; an empty folder is.
    """
    if not is_own_folder(folder):
        return False
    names = {entry.name for entry in folder.iterdir()}
    if names & HUGGING_FACE or {".metadata", "common.pt"} <= names:
        return False
    if names and not names & {WEIGHTS, "context"}:
        return False
    weights = folder / WEIGHTS
    return not (read_json(weights / "metadata.json") and (weights / "common.pt").is_file())


def _is_leftover(entry: Path) -> bool:
    """True for a checkpoint's folder with nothing in it, or nothing but its manifest."""
    if not entry.is_dir() or entry.is_symlink() or step_of(entry.name) is None:
        return False
    try:
        return {inner.name for inner in entry.iterdir()} <= {manifest.FOLDER}
    except OSError:
        return False


def _age_key(folder: Path) -> int:
    for file in (folder / WEIGHTS / "metadata.json", folder / ".metadata", folder):
        try:
            return file.stat().st_mtime_ns
        except OSError:
            continue
    return 0


def _stem(entry: Path) -> str:
    """The name under which NeMo marks a checkpoint file or folder."""
    return entry.name.removesuffix(".ckpt").removesuffix("-EMA")


def _remove(entry: Path) -> None:
    """Remove a file, a link or a folder."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)
