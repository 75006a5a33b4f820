"""Whether the ranks of a run were fed what one rank was: each sample once, and each token at its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from superpod.rehearsal.check import Check

if TYPE_CHECKING:
    from superpod.rehearsal.forks import FinishedRun


def check(ended: FinishedRun, one: FinishedRun) -> Check:
    """Check that the ranks were fed what one rank was, each sample once, and each token at its place."""
    for step, samples in enumerate(one.ranks[0]["fed"]):
        if wrong := _wrong_step(ended, step, [row for tokens, _ in samples for row in tokens]):
            return Check("data", False, f"step {step + 1}: {wrong}")
    count = sum(len(tokens) for step in one.ranks[0]["fed"] for tokens, _ in step)
    return Check("data", True, f"each of {count} samples is fed to one data-parallel rank, and whole")


def _wrong_step(ended: FinishedRun, step: int, wanted: list[list[int]]) -> str:
    """What is wrong with what the ranks of the first stage were fed; '' when it is what one rank was."""
    cp = 1 + max(seen["place"]["context_parallel"] for seen in ended.ranks)
    whole: dict[int, dict[int, list[Any]]] = {}
    by_place: dict[tuple[int, int], tuple[int, Any]] = {}
    for rank, seen in enumerate(ended.ranks):
        if not (batches := seen["fed"][step]):
            continue
        dp, part = seen["place"]["data_parallel"], seen["place"]["context_parallel"]
        first, same = by_place.setdefault((dp, part), (rank, batches))
        if same != batches:
            return f"ranks {first} and {rank} hold the same part of the batch, and were fed different tokens"
        if wrong := _wrong_positions(rank, part, cp, batches):
            return wrong
        if first == rank:
            whole.setdefault(dp, {})[part] = batches
    rows = {
        dp: [_joined(parts, i, j) for i, b in enumerate(parts[0]) for j in range(len(b[0]))]
        for dp, parts in whole.items()
    }
    if sorted(row for mine in rows.values() for row in mine) == sorted(wanted):
        return ""
    for dp, mine in rows.items():
        for other in range(dp):
            if any(row in rows[other] for row in mine):
                return f"data-parallel ranks {other} and {dp} were fed the same samples"
    return "the ranks were fed other samples than one rank was"


def _wrong_positions(rank: int, part: int, cp: int, batches: list[Any]) -> str:
    for _, positions in batches:
        for row in positions:
            if row != (right := _positions(len(row), part, cp)):
                held = f"rank {rank}, which holds part {part} of {cp} of the sequence,"
                return f"{held} was fed positions {_spans(row)}, not {_spans(right)}"
    return ""


def _positions(count: int, part: int, cp: int) -> list[int]:
    """Each part of the sequence is an early and a late chunk of it (Megatron's get_batch_on_this_cp_rank)."""
    if cp == 1:
        return list(range(count))
    chunk, late = count // 2, 2 * cp - 1 - part
    return [*range(part * chunk, (part + 1) * chunk), *range(late * chunk, (late + 1) * chunk)]


def _spans(numbers: list[int]) -> str:
    """`0-7, 24-31`."""
    starts = [i for i, n in enumerate(numbers) if not i or n != numbers[i - 1] + 1]
    return ", ".join(f"{numbers[a]}-{numbers[b - 1]}" for a, b in zip(starts, [*starts[1:], len(numbers)], strict=True))


def _joined(parts: dict[int, Any], batch: int, sample: int) -> list[int]:
    """The tokens of a sample, from all parts of the sequence, in order."""
    pairs = [
        pair for part in parts.values() for pair in zip(part[batch][1][sample], part[batch][0][sample], strict=True)
    ]
    return [token for _, token in sorted(pairs)]
