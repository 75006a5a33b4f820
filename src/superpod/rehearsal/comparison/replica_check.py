"""Compares the parameters of a run's ranks: replicas must be identical, and each layer must be on one stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from superpod.common.units import format_ranks
from superpod.rehearsal.comparison import CheckResult

if TYPE_CHECKING:
    from superpod.rehearsal.training.forked_run import FinishedRun
    from superpod.rehearsal.training.rank_record import RankRecord


class Shard(NamedTuple):
    """The identity of a parameter shard. All ranks that hold the same shard must hold the same bits."""

    stage: int | None
    """None for a tied embedding, which is on two stages."""
    name: str
    expert_rank: int | None
    """None unless the parameter belongs to an expert."""
    tensor_rank: int | None
    """None for a parameter that every tensor-parallel rank holds completely."""


def find_changed_parameters(record: RankRecord) -> list[str]:
    """Return the names of the parameters that training changed on a rank."""
    return [name for name, (digest, *_) in record["after"].items() if digest != record["before"][name][0]]


def check_replicas(run: FinishedRun) -> Iterator[CheckResult]:
    """Check that all ranks with the same shard of a parameter hold the same bits; yield nothing without replicas."""
    holders: dict[Shard, dict[str, list[int]]] = {}  # {shard: {digest: ranks}}
    for rank, record in enumerate(run.ranks):
        for name, (digest, sharded, expert, tied) in record["after"].items():
            shard = _identify_shard(name, sharded, expert, record["place"])
            if tied:  # the two stages hold it under two names
                shard = shard._replace(stage=None, name="the tied embedding")
            holders.setdefault(shard, {}).setdefault(digest, []).append(rank)
    replicated_count = sum(sum(map(len, digests.values())) > 1 for digests in holders.values())
    differing_shards = [(shard.name, digests) for shard, digests in holders.items() if len(digests) > 1]
    if differing_shards:
        name, digests = differing_shards[0]
        sides = " and ".join(format_ranks(ranks) for ranks in digests.values())
        message = f"{name} differs between {sides}"
        if len(differing_shards) > 1:
            message += f", and {len(differing_shards) - 1} more"
        yield CheckResult("replicas agree", False, message)
    elif replicated_count:
        message = f"{replicated_count} parameters have the same bits on every rank that holds them"
        yield CheckResult("replicas agree", True, message)


def _identify_shard(name: str, is_sharded: bool, expert: bool, place: dict[str, int]) -> Shard:
    """Return the identity of the shard of a parameter on a rank; `place` is that of `RankRecord`."""
    tensor_rank = expert_rank = None
    if expert:
        expert_rank = place["expert_model_parallel"]
    if is_sharded:
        # Experts are sharded over their own tensor-parallel group, which may differ from that of the other layers.
        tensor_rank = place["expert_tensor_parallel"] if expert else place["tensor_model_parallel"]
    return Shard(place["pipeline_model_parallel"], name, expert_rank, tensor_rank)


def check_layers(run: FinishedRun, count: int) -> CheckResult:
    """Check that each decoder layer, from 1 to `count`, is on exactly one stage."""
    stages: dict[int, set[int]] = {}
    for record in run.ranks:
        stages.setdefault(record["place"]["pipeline_model_parallel"], set()).update(record["layers"])
    occurrences = Counter(number for numbers in stages.values() for number in numbers)
    errors = [f"layer {number} of {count} is on no stage" for number in range(1, count + 1) if not occurrences[number]]
    errors += [f"layer {number} is on {times} stages" for number, times in sorted(occurrences.items()) if times > 1]
    errors += [f"layer {number} exceeds the model's {count}" for number in sorted(occurrences) if number > count]
    return CheckResult("layers", not errors, "; ".join(errors) or f"{count} layers, each on one stage")
