"""Check that the files of a checkpoint without a complete manifest belong to the same save. Standard library only.

Sizes are not sufficient, since a shard has the same size at every step. The checks are:

- `common.pt` contains the step of the trainer, which must match the folder name.
- Shards differ between steps, since optimizer states do. If a shard equals the shard of another step while other shards
  differ, it was copied from that step.
- Megatron writes `common.pt` first and `metadata.json` last. A shard with an earlier or later time was replaced, or
  copied together with all others. This is a reason for doubt, not evidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from superpod.runtime.checkpoints import manifest
from superpod.runtime.checkpoints.checkpoint_files import Content, Problem, check_in_threads, contents_of
from superpod.runtime.checkpoints.checkpoint_folder import step_of
from superpod.runtime.checkpoints.checkpoint_metadata import saved_step, weights_of


@dataclass(frozen=True)
class CrossCheck:
    """Evidence that the files of a checkpoint belong to different saves."""

    problems: list[Problem]
    """conclusive evidence; prevents resuming"""
    doubt: str = ""
    """why another checkpoint is preferred; '' = no doubt"""


def cross_check(checkpoint: Path, others: Sequence[Path]) -> CrossCheck:
    """Check the consistency of a checkpoint, also with the `others` of its run. Raises OSError, ValueError."""
    named, saved = step_of(checkpoint.name), saved_step(checkpoint)
    if named is not None and saved is not None and named != saved:
        return CrossCheck(
            [Problem.of_file("common.pt", f"contains step {saved}, but the folder is named after step {named}")]
        )
    shards = _shards(checkpoint)
    is_own = saved is not None  # its common.pt has this step, so it is not a renamed copy of another checkpoint
    copied_shards = []
    for other in others:
        if step_of(other.name) != named:
            copied_shards += _find_copied_shards(shards, other, is_own=is_own)
    if copied_shards:
        return CrossCheck(copied_shards)
    unlisted_shards = [shard for shard in shards if not shard.is_in_manifest]
    late_names = [shard.path.name for shard in unlisted_shards if not shard.is_in_time]
    return CrossCheck([], _describe_doubt(late_names, len(unlisted_shards)))


@dataclass(frozen=True)
class _Shard:
    path: Path
    name: str
    sample: int
    is_in_manifest: bool
    is_in_time: bool
    """whether it was written between common.pt and metadata.json"""


def _shards(checkpoint: Path) -> list[_Shard]:
    """Return the shards of a checkpoint by name; read samples of those that are not in the manifest. Raises OSError."""
    weights = weights_of(checkpoint)
    begin, end = _mtime_ns(weights / "common.pt"), _mtime_ns(weights / "metadata.json")
    shards: list[_Shard] = []

    def read(content: Content) -> None:
        path = checkpoint / content.name
        if content.sample is not None:
            shards.append(_Shard(path, content.name, content.sample, is_in_manifest=True, is_in_time=True))
            return
        record = manifest.record(path, fully=False)
        is_in_time = not (begin and end and record.mtime_ns) or begin <= record.mtime_ns <= end
        shards.append(_Shard(path, content.name, record.sample or 0, is_in_manifest=False, is_in_time=is_in_time))

    check_in_threads(read, [c for c in contents_of(checkpoint).contents if c.name.endswith(".distcp")])
    return sorted(shards, key=lambda shard: shard.name)


def _mtime_ns(file: Path) -> int:
    """Return the modification time of a file in nanoseconds; 0 if it cannot be read."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _find_copied_shards(shards: Sequence[_Shard], other: Path, *, is_own: bool) -> list[Problem]:
    """Return a problem for each shard that was copied from the checkpoint `other`.

    If all shards are equal and `is_own` is False, there is no problem: this may be a renamed copy of `other`.
    """
    records = manifest.read(other).records
    same_shards = [shard for shard in shards if _sample(other, shard.name, records) == shard.sample]
    if len(same_shards) == len(shards) and not is_own:
        return []
    # If the other checkpoint has no manifest, only the time shows which of the two was copied.
    suspects = [s for s in same_shards if not s.is_in_manifest and (s.name in records or not s.is_in_time)]
    copied_names = [shard.name for shard in suspects if _is_same(shard.path, other, shard)]
    return [Problem.of_file(name, f"is a copy of the file in {other.name}") for name in copied_names]


def _sample(checkpoint: Path, name: str, records: Mapping[str, manifest.FileRecord]) -> int | None:
    """Return the CRC-32 of a file's sample, from the manifest or from the file; None if it cannot be read."""
    if name in records and records[name].sample is not None:
        return records[name].sample
    try:
        return manifest.record(checkpoint / name, fully=False).sample
    except OSError:
        return None


def _is_same(file: Path, other: Path, shard: _Shard) -> bool:
    """Return whether `file` has the bytes of the same shard in `other`. True if that shard no longer exists."""
    try:
        other_crc = manifest.record(other / shard.name).crc
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return manifest.record(file).crc == other_crc


def _describe_doubt(late_names: Sequence[str], shards: int) -> str:
    if not late_names:
        return ""
    names = ", ".join(late_names[:3])
    if len(late_names) > 3:
        names += ", ..."
    verb = "was" if len(late_names) == 1 else "were"
    return f"{names} ({len(late_names)} of {shards} files) {verb} not written between common.pt and metadata.json"
