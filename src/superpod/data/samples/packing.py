"""Cut encoded samples to length, split them, and pack them into long sequences, in the form that NeMo reads."""

from __future__ import annotations

import bisect
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from superpod.common import atomic_file
from superpod.data.samples.chat import Encoded
from superpod.errors import UserError

if TYPE_CHECKING:
    import numpy as np

LONG = ("refuse", "cut", "drop")
"""What can be done with samples that are longer than the sequence."""


@dataclass(frozen=True)
class Counts:
    """How many samples are left, cut or dropped; `tokens` are those the model reads, `longest` is before any cut."""

    samples: int
    cut: int = 0
    dropped: int = 0
    tokens: int = 0
    learnt: int = 0
    longest: int = 0


def fit(samples: Sequence[Encoded], length: int, long: str = LONG[0]) -> tuple[list[Encoded], Counts]:
    """The samples with at most `length` tokens to read (and one more to predict), and how many were cut or dropped.

    A cut sample loses its end. One with nothing left to learn is dropped.

    Raises:
        UserError: long samples, and `long` is "refuse"; or no sample is left.
    """
    too_long = sum(len(sample.ids) > length + 1 for sample in samples)
    longest = max(samples, key=lambda sample: len(sample.ids))
    if too_long and long == "refuse":
        where = f"{longest.file}:{longest.line}" if longest.file else f"line {longest.line}"
        raise UserError(
            f"{too_long} of {len(samples)} samples have more than {length} tokens, the longest, "
            f"{where}, {len(longest.ids)}",
            "--long cut keeps their beginning, --long drop leaves them out, data.seq_length=N makes room",
        )
    kept: list[Encoded] = []
    cut = 0
    for sample in samples:
        fits = len(sample.ids) <= length + 1
        shorter = sample if fits else replace(sample, ids=sample.ids[: length + 1], learnt=sample.learnt[: length + 1])
        if (fits or long == "cut") and any(shorter.learnt[1:]):  # the first token is never predicted
            kept.append(shorter)
            cut += not fits
    if not kept:
        raise UserError(f"no sample is left: all {len(samples)} are longer than {length} tokens", "data.seq_length=N")
    total = sum(len(sample.ids) - 1 for sample in kept)
    learnt = sum(sum(sample.learnt[1:]) for sample in kept)
    return kept, Counts(len(kept), cut, len(samples) - len(kept), total, learnt, len(longest.ids))


def pack(samples: Sequence[Encoded], size: int, multiple: int, seed: int) -> list[list[Encoded]]:
    """Samples packed into bins of at most `size` tokens to read, by best fit in order of falling length.

    Every sample is padded to a multiple of `multiple` tokens: context parallelism cuts it into that many pieces.
    """
    bins: list[list[Encoded]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for sample in sorted(samples, key=lambda sample: -len(sample.ids)):
        need = _padded(sample, multiple)
        at = bisect.bisect_left(room, (need, -1))  # the fullest bin that the sample fits in
        left, number = room.pop(at) if at < len(room) else (size, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append(sample)
        bisect.insort(room, (left - need, number))
    random.Random(seed).shuffle(bins)  # otherwise training would go from long samples to short ones
    return bins


def _padded(sample: Encoded, multiple: int) -> int:
    return -(-(len(sample.ids) - 1) // multiple) * multiple


def write(bins: Sequence[Sequence[Encoded]], path: Path, *, multiple: int, filler: int, batch: int = 1) -> None:
    """Write bins as NeMo's `GPTSFTPackedDataset` reads them, an .npy of dicts; `filler` is the token that pads.

    Bins that teach nothing fill up the last `batch`, because NeMo drops an incomplete validation batch.
    """
    import numpy as np

    rows = [_row(samples, multiple, filler) for samples in bins]
    blank = _Packed(**{**rows[0], "loss_mask": np.zeros_like(rows[0]["loss_mask"])})
    rows += [blank] * (-len(rows) % batch)
    array = np.empty(len(rows), dtype=object)
    array[:] = rows
    with atomic_file.opened(path) as stream:
        np.save(stream, array, allow_pickle=True)


class _Packed(TypedDict):
    """A packed sequence, as NeMo unpacks it; arrays, because lists take eight times the memory of every process."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    seq_start_id: list[int]


def _row(samples: Sequence[Encoded], multiple: int, filler: int) -> _Packed:
    """One packed sequence. The model reads a sample's ids but the last, and predicts its ids but the first, so that
    `loss_mask[i]` is of the prediction of `input_ids[i + 1]`."""
    import numpy as np

    lengths = [_padded(sample, multiple) + 1 for sample in samples]
    starts = [0, *itertools.accumulate(lengths)]
    row = _Packed(
        input_ids=np.full(starts[-1], filler, np.int32),
        loss_mask=np.zeros(starts[-1], np.uint8),
        seq_start_id=starts[:-1],
    )
    for sample, start in zip(samples, starts, strict=False):
        row["input_ids"][start : start + len(sample.ids)] = sample.ids
        row["loss_mask"][start : start + len(sample.ids) - 1] = bytearray(sample.learnt[1:])
    return row


def write_metadata(parts: Sequence[Sequence[Sequence[Encoded]]], path: Path) -> None:
    """Write the figures that NeMo wants beside packed files; each part is the bins of one file."""
    facts = [
        {
            "max_samples_per_bin": max(map(len, bins)),
            "dataset_max_seqlen": max(len(sample.ids) for samples in bins for sample in samples),
            "min_packed_seqlen": min(sum(len(sample.ids) - 1 for sample in samples) for samples in bins),
        }
        for bins in parts
    ]
    path.write_text(json.dumps(facts))
