"""Compares what the ranks of a run hold: replicas bit for bit, and each layer on one stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from superpod.rehearsal.check_result import CheckResult

if TYPE_CHECKING:
    from superpod.rehearsal.training.forked_run import FinishedRun
    from superpod.rehearsal.training.rank_record import RankRecord


class Shard(NamedTuple):
    """What tells one shard of a parameter from another: ranks with equal shards must hold the same bits."""

    stage: int | None
    """None for a tied embedding, which two stages hold."""
    name: str
    expert_rank: int | None
    """None for a parameter that is not an expert's."""
    tensor_rank: int | None
    """None for a parameter that every tensor-parallel rank holds whole."""


def changed_parameters(record: RankRecord) -> list[str]:
    """Names of the parameters that a rank's training changed."""
    return [name for name, (digest, *_) in record["after"].items() if digest != record["before"][name][0]]


def replicas(run: FinishedRun) -> Iterator[CheckResult]:
    """Check that each parameter is the same on all ranks that hold it, or the same shard of it."""
    holders: dict[Shard, dict[str, list[int]]] = {}  # {shard: {digest: ranks}}
    for rank, record in enumerate(run.ranks):
        for name, (digest, sharded, expert, tied) in record["after"].items():
            shard = _shard(name, sharded, expert, record["place"])
            if tied:  # the two stages hold it under two names
                shard = shard._replace(stage=None, name="the tied embedding")
            holders.setdefault(shard, {}).setdefault(digest, []).append(rank)
    replicated = sum(sum(map(len, digests.values())) > 1 for digests in holders.values())
    differing = [(shard.name, digests) for shard, digests in holders.items() if len(digests) > 1]
    if differing:
        name, digests = differing[0]
        sides = " and ".join(f"ranks {', '.join(map(str, ranks))}" for ranks in digests.values())
        more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
        yield CheckResult("replicas agree", False, f"{name} differs between {sides}{more}")
    elif replicated:
        message = f"{replicated} parameters have the same bits on every rank that holds them"
        yield CheckResult("replicas agree", True, message)


def _shard(name: str, sharded: bool, expert: bool, place: dict[str, int]) -> Shard:
    # Experts are sharded over their own tensor-parallel group, which may differ from that of the other layers.
    tensor_rank = place["expert_tensor_parallel" if expert else "tensor_model_parallel"] if sharded else None
    expert_rank = place["expert_model_parallel"] if expert else None
    return Shard(place["pipeline_model_parallel"], name, expert_rank, tensor_rank)


def layers(run: FinishedRun, count: int) -> CheckResult:
    """Check that each of the decoder's layers, 1 to `count`, is on one stage."""
    stages: dict[int, set[int]] = {}
    for record in run.ranks:
        stages.setdefault(record["place"]["pipeline_model_parallel"], set()).update(record["layers"])
    held = Counter(number for numbers in stages.values() for number in numbers)
    wrong = [f"layer {number} of {count} is on no stage" for number in range(1, count + 1) if not held[number]]
    wrong += [f"layer {number} is on {times} stages" for number, times in sorted(held.items()) if times > 1]
    wrong += [f"layer {number} is beyond the {count} of the model" for number in sorted(held) if number > count]
    return CheckResult("layers", not wrong, "; ".join(wrong) or f"{count} layers, each on one stage")
