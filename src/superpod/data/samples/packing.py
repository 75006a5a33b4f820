"""Truncate tokenized samples and pack them into long sequences in NeMo's format."""

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
"""Values of `--long`, for samples that are longer than the sequence length."""


@dataclass(frozen=True)
class Counts:
    """Numbers of samples and tokens after truncation, stored in JSON under these names."""

    samples: int
    cut: int = 0
    """Samples that were truncated."""
    dropped: int = 0
    """Samples that were left out."""
    tokens: int = 0
    """Input tokens."""
    learnt: int = 0
    """Tokens in the loss."""
    longest: int = 0
    """Tokens of the longest sample before truncation."""


def limit_lengths(samples: Sequence[Encoded], length: int, long: str = LONG[0]) -> tuple[list[Encoded], Counts]:
    """Return the samples with at most `length` input tokens and one target token, and their counts.

    Longer samples are truncated at the end if `long` is "cut", dropped if it is "drop", and an error if it is "refuse".
    Samples without a token in the loss are dropped.

    Raises:
        UserError: a sample is too long and `long` is "refuse", or no sample remains.
    """
    too_long = sum(len(sample.ids) > length + 1 for sample in samples)
    longest_sample = max(samples, key=lambda sample: len(sample.ids))
    if too_long and long == "refuse":
        location = (
            f"{longest_sample.file}:{longest_sample.line}" if longest_sample.file else f"line {longest_sample.line}"
        )
        raise UserError(
            f"{too_long} of {len(samples)} samples have more than {length} tokens; the longest, {location}, has "
            f"{len(longest_sample.ids)}",
            "truncate them with --long cut, drop them with --long drop, or increase data.seq_length=N",
        )
    kept: list[Encoded] = []
    truncated = 0
    for sample in samples:
        shortened_sample = sample
        is_long = len(sample.ids) > length + 1
        if is_long:
            if long != "cut":
                continue
            ids, loss_mask = sample.ids[: length + 1], sample.loss_mask[: length + 1]
            shortened_sample = replace(sample, ids=ids, loss_mask=loss_mask)
        if any(shortened_sample.loss_mask[1:]):  # the first token is never predicted
            kept.append(shortened_sample)
            truncated += is_long
    if not kept:
        message = f"no sample remains: all {len(samples)} are longer than {length} tokens, or have no token in the loss"
        raise UserError(message, "increase data.seq_length=N")
    return kept, Counts(
        samples=len(kept),
        cut=truncated,
        dropped=len(samples) - len(kept),
        tokens=sum(len(sample.ids) - 1 for sample in kept),
        learnt=sum(sum(sample.loss_mask[1:]) for sample in kept),
        longest=len(longest_sample.ids),
    )


def pack(samples: Sequence[Encoded], size: int, multiple: int, seed: int) -> list[list[Encoded]]:
    """Pack samples into bins of at most `size` input tokens with best-fit decreasing, in random order.

    Args:
        samples: samples of at most `size` input tokens.
        size: input tokens per bin.
        multiple: each sample is padded to a multiple of this many tokens, because context parallelism splits it.
        seed: seed for shuffling the bins.
    """
    bins: list[list[Encoded]] = []
    free: list[tuple[int, int]] = []  # (free tokens, index of the bin), sorted
    for sample in sorted(samples, key=lambda sample: -len(sample.ids)):
        needed_length = _compute_padded_length(sample, multiple)
        index = bisect.bisect_left(free, (needed_length, -1))  # the fullest bin with enough space
        if index < len(free):
            space, number = free.pop(index)
        else:
            space, number = size, len(bins)
            bins.append([])
        bins[number].append(sample)
        bisect.insort(free, (space - needed_length, number))
    random.Random(seed).shuffle(bins)  # otherwise training would proceed from long samples to short ones
    return bins


def _compute_padded_length(sample: Encoded, multiple: int) -> int:
    """Return the number of input tokens of a sample, rounded up to a multiple of `multiple`."""
    return -(-(len(sample.ids) - 1) // multiple) * multiple


def write_bins(bins: Sequence[Sequence[Encoded]], path: Path, *, multiple: int, filler: int, batch: int = 1) -> None:
    """Write bins as an .npy file of dicts for NeMo's `GPTSFTPackedDataset`.

    Args:
        bins: samples per packed sequence.
        path: the file.
        multiple: each sample is padded to a multiple of this many tokens.
        filler: id of the padding token.
        batch: the file is filled to a multiple of this many sequences with fully masked ones, because NeMo drops
            incomplete validation batches.
    """
    import numpy as np

    rows = [_concatenate(samples, multiple, filler) for samples in bins]
    masked = _PackedSequence(**{**rows[0], "loss_mask": np.zeros_like(rows[0]["loss_mask"])})
    padding_rows = -len(rows) % batch
    rows += [masked] * padding_rows
    array = np.empty(len(rows), dtype=object)
    array[:] = rows
    with atomic_file.open_atomically(path) as stream:
        np.save(stream, array, allow_pickle=True)


class _PackedSequence(TypedDict):
    """A packed sequence in NeMo's format. The arrays use an eighth of the memory of lists."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    seq_start_id: list[int]


def _concatenate(samples: Sequence[Encoded], multiple: int, filler: int) -> _PackedSequence:
    """Return the samples of a bin as one packed sequence.

    The inputs of a sample are all ids except the last, the targets all except the first, so `loss_mask[i]` refers to
    the prediction of `input_ids[i + 1]`.
    """
    import numpy as np

    lengths = [_compute_padded_length(sample, multiple) + 1 for sample in samples]
    starts = [0, *itertools.accumulate(lengths)]
    row = _PackedSequence(
        input_ids=np.full(starts[-1], filler, np.int32),
        loss_mask=np.zeros(starts[-1], np.uint8),
        seq_start_id=starts[:-1],
    )
    for sample, start in zip(samples, starts, strict=False):
        row["input_ids"][start : start + len(sample.ids)] = sample.ids
        row["loss_mask"][start : start + len(sample.ids) - 1] = bytearray(sample.loss_mask[1:])
    return row


def write_metadata(parts: Sequence[Sequence[Sequence[Encoded]]], path: Path) -> None:
    """Write the statistics that NeMo requires for packed files; each element of `parts` has the bins of one file."""
    facts = [
        {
            "max_samples_per_bin": max(map(len, bins)),
            "dataset_max_seqlen": max(len(sample.ids) for samples in bins for sample in samples),
            "min_packed_seqlen": min(sum(len(sample.ids) - 1 for sample in samples) for samples in bins),
        }
        for bins in parts
    ]
    path.write_text(json.dumps(facts))
