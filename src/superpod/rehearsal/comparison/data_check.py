"""Compares the tokens that entered the ranks with those of the one-rank run: each sample once, each token at its place.

"Part" is a context-parallel rank's share of a sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.rehearsal.check_result import CheckResult

if TYPE_CHECKING:
    from superpod.rehearsal.training.forked_run import FinishedRun
    from superpod.rehearsal.training.rank_record import MicroBatch


def check(run: FinishedRun, one: FinishedRun) -> CheckResult:
    """Check that `run` trained on the samples of `one`, the run on one rank.

    Each sample must enter one data-parallel rank only, and each token its own position.
    """
    steps = one.ranks[0]["inputs"]
    for step, micro_batches in enumerate(steps):
        samples = [row for tokens, _ in micro_batches for row in tokens]
        if fault := _fault(run, step, samples):
            return CheckResult("data", False, f"step {step + 1}: {fault}")
    count = sum(len(tokens) for micro_batches in steps for tokens, _ in micro_batches)
    return CheckResult("data", True, f"{count} samples, each whole on one data-parallel rank")


def _fault(run: FinishedRun, step: int, expected: list[list[int]]) -> str:
    """What is wrong with the inputs of a step; '' when they are the `expected` samples."""
    cp = 1 + max(record["place"]["context_parallel"] for record in run.ranks)
    first_rank: dict[tuple[int, int], int] = {}  # by data-parallel rank and part
    parts: dict[int, dict[int, list[MicroBatch]]] = {}  # by data-parallel rank, then part
    for rank, record in enumerate(run.ranks):
        if not (batches := record["inputs"][step]):
            continue  # not on the first stage
        dp, part = record["place"]["data_parallel"], record["place"]["context_parallel"]
        first = first_rank.setdefault((dp, part), rank)
        if parts.setdefault(dp, {}).setdefault(part, batches) != batches:
            return f"ranks {first} and {rank} hold the same part of the batch, but received different tokens"
        if fault := _wrong_positions(rank, part, cp, batches):
            return fault
    return _wrong_samples({dp: _samples(by_part) for dp, by_part in parts.items()}, expected)


def _wrong_samples(samples: dict[int, list[list[int]]], expected: list[list[int]]) -> str:
    """How the samples of all data-parallel ranks together differ from the `expected` ones."""
    if sorted(sample for own in samples.values() for sample in own) == sorted(expected):
        return ""
    for dp, own in samples.items():
        for other in range(dp):
            if any(sample in samples[other] for sample in own):
                return f"data-parallel ranks {other} and {dp} received the same samples"
    return "the ranks received other samples than one rank"


def _wrong_positions(rank: int, part: int, cp: int, batches: list[MicroBatch]) -> str:
    for _, positions in batches:
        for row in positions:
            if row != (right := _positions(len(row), part, cp)):
                holder = f"rank {rank}, which holds part {part} of {cp} of the sequence,"
                return f"{holder} received positions {_spans(row)}, not {_spans(right)}"
    return ""


def _positions(count: int, part: int, cp: int) -> list[int]:
    """Positions of a part of `count` tokens: an early and a late chunk (Megatron's get_batch_on_this_cp_rank)."""
    if cp == 1:
        return list(range(count))
    chunk, late = count // 2, 2 * cp - 1 - part
    return [*range(part * chunk, (part + 1) * chunk), *range(late * chunk, (late + 1) * chunk)]


def _spans(numbers: list[int]) -> str:
    """`0-7, 24-31`."""
    starts = [i for i, n in enumerate(numbers) if not i or n != numbers[i - 1] + 1]
    return ", ".join(f"{numbers[a]}-{numbers[b - 1]}" for a, b in zip(starts, [*starts[1:], len(numbers)], strict=True))


def _samples(by_part: dict[int, list[MicroBatch]]) -> list[list[int]]:
    """The samples of a data-parallel rank, put together from the parts of their sequences."""
    return [
        _joined([by_part[part][batch] for part in by_part], row)
        for batch, (tokens, _) in enumerate(by_part[0])
        for row in range(len(tokens))
    ]


def _joined(parts: list[MicroBatch], row: int) -> list[int]:
    """The tokens of one sample in the order of their positions."""
    pairs = [pair for tokens, positions in parts for pair in zip(positions[row], tokens[row], strict=True)]
    return [token for _, token in sorted(pairs)]
