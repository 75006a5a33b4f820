"""Whether the files of a checkpoint that no manifest vouches for belong to one save. Standard library only.

Sizes do not tell: a shard has the same size at every step. What does:

- `common.pt` holds the trainer's step, which the folder's name must agree with;
- the bytes of a shard differ from step to step, for the moments of an optimizer do: one that equals the shard of
  another step, while others do not, was put there;
- Megatron writes `common.pt` first and `metadata.json` last. The time of a shard that lies outside tells that it was
  replaced, or copied with all others: a doubt, and no proof.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from superpod.node import manifest
from superpod.node.checkpoint_files import Content, contents_of, in_threads
from superpod.node.checkpoint_metadata import saved_step, weights_of
from superpod.node.checkpoints import step_of


@dataclass(frozen=True)
class CrossCheck:
    """What speaks against the files of a checkpoint."""

    problems: list[str]
    """proofs: it must not be trained on"""
    doubt: str = ""
    """why another checkpoint is to be preferred; '' = nothing"""


def cross_check(checkpoint: Path, others: Sequence[Path]) -> CrossCheck:
    """Check a checkpoint that is not verified, against itself and the `others` of its run. Raises OSError."""
    named, saved = step_of(checkpoint.name), saved_step(checkpoint)
    if named is not None and saved is not None and named != saved:
        return CrossCheck([f"common.pt is of step {saved}, and the folder of step {named}"])
    shards = _shards(checkpoint)
    older_or_newer = [other for other in others if step_of(other.name) != named]
    is_own = saved is not None  # its common.pt is of this step, so that it is no copy of the other under a new name
    foreign = [problem for other in older_or_newer for problem in _foreign(shards, other, is_own=is_own)]
    if foreign:
        return CrossCheck(foreign)
    unvouched = [shard for shard in shards if not shard.is_vouched]
    return CrossCheck([], _doubt([shard.path.name for shard in unvouched if not shard.is_in_time], len(unvouched)))


@dataclass(frozen=True)
class _Shard:
    path: Path
    name: str
    sample: int
    is_vouched: bool
    """the manifest has its sample"""
    is_in_time: bool
    """it was written between common.pt and metadata.json"""


def _shards(checkpoint: Path) -> list[_Shard]:
    """Every shard; reads samples of those that are not in the manifest."""
    weights = weights_of(checkpoint)
    begin, end = _time(weights / "common.pt"), _time(weights / "metadata.json")
    shards: list[_Shard] = []

    def read(content: Content) -> str:
        path = checkpoint / content.name
        if content.sample is not None:
            shards.append(_Shard(path, content.name, content.sample, is_vouched=True, is_in_time=True))
            return ""
        record = manifest.record(path, fully=False)
        is_in_time = not (begin and end and record.mtime_ns) or begin <= record.mtime_ns <= end
        shards.append(_Shard(path, content.name, record.sample or 0, is_vouched=False, is_in_time=is_in_time))
        return ""

    in_threads(read, [c for c in contents_of(checkpoint).contents if c.name.endswith(".distcp")])
    return sorted(shards, key=lambda shard: shard.name)


def _time(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _foreign(shards: Sequence[_Shard], other: Path, *, is_own: bool) -> list[str]:
    """Shards that are those of another step; none where all of them are and nothing says that it is no copy of it."""
    records = manifest.read(other).records
    same = [shard for shard in shards if _sample(other, shard.name, records) == shard.sample]
    if len(same) == len(shards) and not is_own:
        return []
    # Without a manifest there, the time alone tells which of the two is out of place.
    suspects = [s for s in same if not s.is_vouched and (s.name in records or not s.is_in_time)]
    misplaced = [shard.name for shard in suspects if _is_same(shard.path, other, shard)]
    return [f"{name} is the file of {other.name}, byte for byte" for name in misplaced]


def _sample(checkpoint: Path, name: str, records: Mapping[str, manifest.FileRecord]) -> int | None:
    """The sample of a file, by the manifest or by reading it; None where it is not there."""
    known = records[name].sample if name in records else None
    try:
        return manifest.record(checkpoint / name, fully=False).sample if known is None else known
    except OSError:
        return None


def _is_same(file: Path, other: Path, shard: _Shard) -> bool:
    """Whether all bytes are the same; where the other is gone, for it was moved here, its sample was enough."""
    try:
        there = manifest.record(other / shard.name).crc
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return manifest.record(file).crc == there


def _doubt(late: Sequence[str], shards: int) -> str:
    if not late:
        return ""
    names = ", ".join(late[:3]) + ", ..." * (len(late) > 3)
    return f"{names} ({len(late)} of {shards} files) was not written between its common.pt and its metadata.json"
