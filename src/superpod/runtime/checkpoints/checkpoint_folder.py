"""Classify the entries of a run's checkpoint folder: checkpoints with their steps, and interrupted saves."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

from superpod.common.json_files import read_json
from superpod.runtime.checkpoints import manifest
from superpod.runtime.checkpoints.checkpoint_metadata import WEIGHTS

MARK = "-unfinished"  # NeMo's ModelCheckpoint.UNFINISHED_CHECKPOINT_SUFFIX
HUGGING_FACE = {"hf_weights", "hf_adapter"}
"""Entries of an exported folder, from which no run resumes."""


def candidates(checkpoints: Path) -> list[Path]:
    """Return the checkpoints in a folder, including incomplete ones, newest first (by step, then by save time).

    Links to folders elsewhere are included, even if they are dangling. Raises OSError if the folder cannot be listed.
    """
    entries = sorted(checkpoints.iterdir()) if checkpoints.is_dir() else []
    folders = [e for e in entries if (is_own_folder(e) or is_dangling(e)) and is_checkpoint(e)]
    return sorted(folders, key=lambda folder: (step_of(folder.name) or 0, _save_time_ns(folder)), reverse=True)


def is_own_folder(entry: Path) -> bool:
    """Return whether `entry` is a folder, or a link to a folder elsewhere, such as a checkpoint moved by the user.

    False for NeMo's own links (`*-last`), whose target is next to them, and for dangling links. Raises OSError if the
    entry cannot be read.
    """
    try:
        facts = os.stat(entry)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise
    return stat.S_ISDIR(facts.st_mode) and not (entry.is_symlink() and _links_to_sibling(entry))


def is_dangling(entry: Path) -> bool:
    """Return whether `entry` links to a missing checkpoint elsewhere, which may become available again."""
    return entry.is_symlink() and not entry.exists() and not _links_to_sibling(entry)


def _links_to_sibling(link: Path) -> bool:
    target = link.parent / os.readlink(link)  # not resolved further, since a sibling may link to elsewhere
    return os.path.realpath(target.parent) == os.path.realpath(link.parent)


def discard_unfinished(checkpoints: Path, *, complete_too: bool = True, but: Collection[str] = ()) -> list[Path]:
    """Remove checkpoints whose save or removal was interrupted, based on NeMo's own marks; return the removed paths.

    NeMo creates `{name}-unfinished` next to a checkpoint that it saves or deletes, and removes marked checkpoints at
    its next start. Empty folders and dangling links to siblings are removed too. Corrupt folders without a mark are
    kept: `runtime/checkpoints/resume.py` moves them. No attempt may be running. With `complete_too` False, marked
    checkpoints that appear complete are kept too, and `resume.py` checks them; those named in `but` are always kept.
    Raises OSError.
    """
    entries = sorted(checkpoints.iterdir()) if checkpoints.is_dir() else []
    marked_folders = marked_names(entries) - set(but)
    if not complete_too:
        marked_folders = {
            name for name in marked_folders if not (checkpoints / name).is_dir() or is_incomplete(checkpoints / name)
        }
    markers = [checkpoints / f"{name}{MARK}" for name in sorted(marked_folders)]
    unfinished = [e for e in entries if e not in markers and (_checkpoint_name(e) in marked_folders or _is_empty(e))]
    for entry in unfinished:
        _remove(entry)
    links = [entry for entry in entries if entry.is_symlink() and entry not in unfinished]
    dangling = [link for link in links if not link.exists() and not is_dangling(link)]
    for entry in [*dangling, *markers]:  # markers last: if this process is killed, the rest is still marked
        _remove(entry)
    return [*unfinished, *dangling, *markers]


def marked_names(entries: Iterable[Path]) -> set[str]:
    """Return the names of checkpoints that NeMo has marked as unfinished, from the entries of their folder."""
    return {entry.name.removesuffix(MARK) for entry in entries if entry.name.endswith(MARK) and entry.is_file()}


def step_of(name: str) -> int | None:
    """Return the number of completed steps at a checkpoint (the index in its name plus one); None if it has no step."""
    match = re.search(r"step=(\d+)", name)
    return int(match[1]) + 1 if match else None


def samples_of(name: str) -> int | None:
    """Return the number of samples consumed at a checkpoint (`consumed_samples=480.0` in its name); None if unknown."""
    match = re.search(r"consumed_samples=(\d+)", name)
    return int(match[1]) if match else None


def is_checkpoint(folder: Path) -> bool:
    """Return whether NeMo created a folder as a checkpoint, based on its content or the step in its name."""
    has_step = step_of(folder.name) is not None
    try:
        names = {entry.name for entry in folder.iterdir()}
    except OSError:
        return has_step
    if names & HUGGING_FACE:
        return False
    return has_step or bool(names & {WEIGHTS, "context"}) or {".metadata", "common.pt"} <= names


def is_incomplete(folder: Path) -> bool:
    """Return whether `folder` is a checkpoint whose save was interrupted. True for an empty folder.

    Megatron writes `weights/common.pt` first and `weights/metadata.json` last; NeMo with `fsdp_dtensor` writes
    `.metadata`, then `common.pt`, into the folder itself. False for Hugging Face folders, and for folders of the user
    with neither weights nor a context.
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


def _is_empty(entry: Path) -> bool:
    """Return whether `entry` is a checkpoint folder that is empty or contains only a manifest."""
    if not entry.is_dir() or entry.is_symlink() or step_of(entry.name) is None:
        return False
    try:
        return {inner.name for inner in entry.iterdir()} <= {manifest.FOLDER}
    except OSError:
        return False


def _save_time_ns(folder: Path) -> int:
    """Return the modification time of the file that is written last, or of the folder; 0 if unknown."""
    for file in (folder / WEIGHTS / "metadata.json", folder / ".metadata", folder):
        try:
            return file.stat().st_mtime_ns
        except OSError:
            continue
    return 0


def _checkpoint_name(entry: Path) -> str:
    """Return the checkpoint name to which NeMo adds MARK for a checkpoint file or folder."""
    return entry.name.removesuffix(".ckpt").removesuffix("-EMA")


def _remove(entry: Path) -> None:
    """Remove a file, a link or a folder."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)
