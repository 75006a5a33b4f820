"""Checks the distribution of samples: compares the input tokens of the ranks with those of the run on one rank.

A "part" is the share of a sequence that a context-parallel rank holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.common.units import spans
from superpod.rehearsal.comparison import CheckResult

if TYPE_CHECKING:
    from superpod.rehearsal.training.forked_run import FinishedRun
    from superpod.rehearsal.training.rank_record import MicroBatch


def check_samples(run: FinishedRun, one_rank_run: FinishedRun) -> CheckResult:
    """Check that a run trained on the same samples as the run on one rank.

    Each sample must go to exactly one data-parallel rank, and each token to its own position.
    """
    steps = one_rank_run.ranks[0]["inputs"]
    for step, micro_batches in enumerate(steps):
        samples = [row for tokens, _ in micro_batches for row in tokens]
        error = _find_error(run, step, samples)
        if error:
            return CheckResult("data", False, f"step {step + 1}: {error}")
    count = sum(len(tokens) for micro_batches in steps for tokens, _ in micro_batches)
    return CheckResult("data", True, f"{count} samples, each complete on one data-parallel rank")


def _find_error(run: FinishedRun, step: int, expected: list[list[int]]) -> str | None:
    """Return the error in the inputs of a step (0-based), or None if they are the `expected` samples."""
    cp = 1 + max(record["place"]["context_parallel"] for record in run.ranks)
    first_rank: dict[tuple[int, int], int] = {}  # by data-parallel rank and part
    parts: dict[int, dict[int, list[MicroBatch]]] = {}  # by data-parallel rank, then part
    for rank, record in enumerate(run.ranks):
        batches = record["inputs"][step]
        if not batches:
            continue  # not on the first stage
        dp, part = record["place"]["data_parallel"], record["place"]["context_parallel"]
        first = first_rank.setdefault((dp, part), rank)
        if parts.setdefault(dp, {}).setdefault(part, batches) != batches:
            return f"ranks {first} and {rank} hold the same part of the batch, but received different tokens"
        for row in (row for _, positions in batches for row in positions):
            expected_row = _get_positions(len(row), part, cp)
            if row != expected_row:
                return (
                    f"rank {rank}, which holds part {part} of {cp} of the sequence, received positions "
                    f"{spans(row)} instead of {spans(expected_row)}"
                )
    return _compare_samples({dp: _join_samples(by_part) for dp, by_part in parts.items()}, expected)


def _compare_samples(samples: dict[int, list[list[int]]], expected: list[list[int]]) -> str | None:
    """Return an error if the samples ({data-parallel rank: samples}) differ from the `expected` ones, or None."""
    if sorted(sample for own in samples.values() for sample in own) == sorted(expected):
        return None
    for dp, own in samples.items():
        for other in range(dp):
            if any(sample in samples[other] for sample in own):
                return f"data-parallel ranks {other} and {dp} received the same samples"
    return "the samples of all ranks differ from those of the run on one rank"


def _get_positions(count: int, part: int, cp: int) -> list[int]:
    """Return the positions of the `count` tokens of context-parallel rank `part`, as in get_batch_on_this_cp_rank."""
    if cp == 1:
        return list(range(count))
    chunk, late = count // 2, 2 * cp - 1 - part
    return [*range(part * chunk, (part + 1) * chunk), *range(late * chunk, (late + 1) * chunk)]


def _join_samples(by_part: dict[int, list[MicroBatch]]) -> list[list[int]]:
    """Concatenate the parts of each sequence on a data-parallel rank; return the tokens of each sample in order."""
    samples = []
    for batch, (first_part, _) in enumerate(by_part[0]):
        for row in range(len(first_part)):
            pairs: list[tuple[int, int]] = []
            for part in by_part.values():
                tokens, positions = part[batch]
                pairs += zip(positions[row], tokens[row], strict=True)
            samples.append([token for _, token in sorted(pairs)])
    return samples
