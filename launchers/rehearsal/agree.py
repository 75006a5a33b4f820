"""Whether ranks that hold the same parameters hold the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from superpod.launchers.rehearsal.forks import Ended
    from superpod.launchers.rehearsal.trial import Check


def moved(seen: dict[str, Any]) -> list[str]:
    """Names of the parameters that a rank's training changed."""
    return [name for name, (digest, *_) in seen["after"].items() if digest != seen["before"][name][0]]


def replicas(ended: Ended) -> Iterator[Check]:
    """Check that each parameter is the same on all ranks that hold it, or the same shard of it."""
    from superpod.launchers.rehearsal.trial import Check

    held: dict[tuple[Any, ...], dict[str, list[int]]] = {}
    for rank, seen in enumerate(ended.ranks):
        for name, (digest, sharded, expert, _) in seen["after"].items():
            held.setdefault(_copy(name, sharded, expert, seen["place"]), {}).setdefault(digest, []).append(rank)
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
