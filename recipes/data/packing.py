"""Encoded samples cut to length, parted, and laid together into long sequences, in the form that NeMo reads."""

from __future__ import annotations

import bisect
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from superpod.errors import UserError
from superpod.recipes.data.chat import Encoded

LONG = ("refuse", "cut", "drop")
"""What to do with samples that are longer than the sequence."""


@dataclass(frozen=True)
class Counts:
    """What became of the samples."""

    samples: int
    cut: int = 0
    dropped: int = 0
    tokens: int = 0
    learnt: int = 0
    longest: int = 0


def fit(samples: Sequence[Encoded], length: int, long: str = LONG[0]) -> tuple[list[Encoded], Counts]:
    """The samples, none of them with more than `length` tokens to read (one more to predict), and what was done.

    A cut sample loses its end; one that has nothing to learn left is dropped.

    Raises:
        UserError: long samples, and `long` is "refuse"; or no sample is left.
    """
    too_long = [each for each in samples if len(each.ids) > length + 1]
    worst = max(samples, key=lambda each: len(each.ids))
    if too_long and long == "refuse":
        raise UserError(
            f"{len(too_long)} of {len(samples)} samples have more than {length} tokens, the longest, "
            f"line {worst.line}, {len(worst.ids)}",
            "--long cut keeps their beginning, --long drop leaves them out, data.seq_length=N makes room",
        )
    kept = [Encoded(each.line, each.ids[: length + 1], each.learnt[: length + 1]) for each in samples]
    if long == "drop":
        kept = [each for each in samples if len(each.ids) <= length + 1]
    kept = [each for each in kept if any(each.learnt[1:])]
    if not kept:
        raise UserError(f"no sample is left: all {len(samples)} are longer than {length} tokens", "data.seq_length=N")
    cut = len({each.line for each in too_long} & {each.line for each in kept})
    total, learnt = sum(len(each.ids) - 1 for each in kept), sum(sum(each.learnt[1:]) for each in kept)
    return kept, Counts(len(kept), cut, len(samples) - len(kept), total, learnt, len(worst.ids))


def part(samples: Sequence[Encoded], share: float, seed: int) -> tuple[list[Encoded], list[Encoded]]:
    """Samples to train on and to validate on, drawn by `seed`; at least one of each.

    Raises:
        UserError: a share outside (0, 1), or a single sample.
    """
    if not 0 < share < 1:
        raise UserError(f"--validation {share} is no share between 0 and 1", "0.05 holds out a twentieth")
    if len(samples) < 2:
        raise UserError("one sample cannot be parted into training and validation", "give more samples")
    order = list(range(len(samples)))
    random.Random(seed).shuffle(order)
    held = set(order[: min(len(samples) - 1, max(1, round(share * len(samples))))])
    return [e for i, e in enumerate(samples) if i not in held], [e for i, e in enumerate(samples) if i in held]


def pack(samples: Sequence[Encoded], size: int, multiple: int, seed: int) -> list[list[Encoded]]:
    """Samples laid together: each bin has at most `size` tokens to read; longest first, each where least is left over.

    Every sample takes a multiple of `multiple` tokens: context parallelism cuts it into so many pieces.
    """
    bins: list[list[Encoded]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for sample in sorted(samples, key=lambda each: -len(each.ids)):
        need = _padded(sample, multiple)
        at = bisect.bisect_left(room, (need, -1))
        left, number = room.pop(at) if at < len(room) else (size, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append(sample)
        bisect.insort(room, (left - need, number))
    random.Random(seed).shuffle(bins)
    return bins


def _padded(sample: Encoded, multiple: int) -> int:
    return -(-(len(sample.ids) - 1) // multiple) * multiple


def write(bins: Sequence[Sequence[Encoded]], path: Path, *, multiple: int, filler: int, batch: int = 1) -> None:
    """Write bins as `GPTSFTPackedDataset` of NeMo reads them, an .npy of dicts; `filler` is the token that pads.

    With `batch`, bins that teach nothing fill the last batch up: NeMo leaves an incomplete validation batch out.
    """
    import numpy as np

    rows = [_row(each, multiple, filler) for each in bins]
    blank = {**rows[0], "loss_mask": [0] * len(rows[0]["loss_mask"])}
    rows += [blank] * (-len(rows) % batch)
    array = np.empty(len(rows), dtype=object)
    array[:] = rows
    passing = path.with_name(f".{path.name}.tmp")
    with open(passing, "wb") as stream:
        np.save(stream, array, allow_pickle=True)
    passing.replace(path)


def _row(samples: Sequence[Encoded], multiple: int, filler: int) -> dict[str, list[int]]:
    """NeMo reads ids without each sample's last, and predicts them without each one's first; the mask goes with those
    that are predicted, but stands where what they are predicted from does."""
    row: dict[str, list[int]] = {"input_ids": [], "loss_mask": [], "seq_start_id": []}
    for sample in samples:
        pad = _padded(sample, multiple) - (len(sample.ids) - 1)
        row["seq_start_id"].append(len(row["input_ids"]))
        row["input_ids"] += [*sample.ids, *[filler] * pad]
        row["loss_mask"] += [*map(int, sample.learnt[1:]), *[0] * (pad + 1)]
    return row


def metadata(parts: Sequence[Sequence[Sequence[Encoded]]], path: Path) -> None:
    """Write the figures that NeMo wants beside packed files."""
    facts = [
        {
            "max_samples_per_bin": max(map(len, bins)),
            "dataset_max_seqlen": max(len(sample.ids) for each in bins for sample in each),
            "min_packed_seqlen": min(sum(len(sample.ids) - 1 for sample in each) for each in bins),
        }
        for bins in parts
    ]
    path.write_text(json.dumps(facts))
