"""Whether the ranks of a run agree: the same bits of what several hold, each layer on one stage, each sample once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from superpod.rehearsal.check import Check

if TYPE_CHECKING:
    from superpod.rehearsal.forks import FinishedRun


def moved(seen: dict[str, Any]) -> list[str]:
    """Names of the parameters that a rank's training changed."""
    return [name for name, (digest, *_) in seen["after"].items() if digest != seen["before"][name][0]]


def replicas(ended: FinishedRun) -> Iterator[Check]:
    """Check that each parameter is the same on all ranks that hold it, or the same shard of it."""
    held: dict[tuple[Any, ...], dict[str, list[int]]] = {}
    for rank, seen in enumerate(ended.ranks):
        for name, (digest, sharded, expert, tied) in seen["after"].items():
            copy = _copy(name, sharded, expert, seen["place"])
            if tied:  # on the first stage and on the last, under two names
                copy = ("", "the tied embedding", *copy[2:])
            held.setdefault(copy, {}).setdefault(digest, []).append(rank)
    copies = sum(sum(map(len, ranks.values())) > 1 for ranks in held.values())
    apart = [(key, ranks) for key, ranks in held.items() if len(ranks) > 1]
    if apart:
        (_, name, *_), ranks = apart[0]
        sides = " and ".join(f"ranks {', '.join(map(str, each))}" for each in ranks.values())
        more = f", and {len(apart) - 1} more" if len(apart) > 1 else ""
        yield Check("replicas agree", False, f"{name} differs between {sides}{more}")
    elif copies:
        yield Check("replicas agree", True, f"{copies} parameters are the same bits wherever they are held")


def _copy(name: str, sharded: bool, expert: bool, place: dict[str, int]) -> tuple[Any, ...]:
    """What tells one shard of a parameter from another: its stage, its name, and the ranks that cut it."""
    stage = place["pipeline_model_parallel"]
    if expert:
        return (stage, name, place["expert_model_parallel"], sharded and place["expert_tensor_parallel"])
    return (stage, name, sharded and place["tensor_model_parallel"])


def layers(ended: FinishedRun, count: int) -> Check:
    """Check that each of the decoder's layers, 1 to `count`, is on one stage."""
    stages: dict[int, set[int]] = {}
    for seen in ended.ranks:
        stages.setdefault(seen["place"]["pipeline_model_parallel"], set()).update(seen["layers"])
    held = Counter(number for numbers in stages.values() for number in numbers)
    wrong = [f"layer {number} of {count} is on no stage" for number in range(1, count + 1) if not held[number]]
    wrong += [f"layer {number} is on {times} stages" for number, times in sorted(held.items()) if times > 1]
    wrong += [f"layer {number} is one of {count}" for number in sorted(held) if number > count]
    return Check("layers", not wrong, "; ".join(wrong) or f"{count} layers, each on one stage")
