"""Detect a stalled attempt from its heartbeats, and find the rank that stopped first. Standard library only."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from superpod.common.json_files import JsonObject, is_number
from superpod.common.units import format_ranks, spans
from superpod.runtime.heartbeat.heartbeat import CHECKS_PER_TIMEOUT, ENDED_PHASES

if TYPE_CHECKING:
    from superpod.runtime.runs.run_folder import Attempt

OTHER_PHASE_FACTOR = 10
"""Timeout of importing, building, saving and validating, as a multiple of the timeout of a training step."""


class StallDetector:
    """Checks the heartbeats of an attempt as rarely as its timeout permits.

    After a step of any rank, no stall can be detected until the timeout has passed. Until then, but for at most half
    the timeout, nothing is read. `train_s` is the timeout of a training step in seconds, and `began` the Unix time at
    which the ranks were started.
    """

    def __init__(self, attempt: Attempt, train_s: float, began: float) -> None:
        self._attempt, self._train_s, self._began = attempt, train_s, began
        self._next = 0.0

    def check(self, now: float | None = None) -> str | None:
        """Return a message about a stall; None if there is none, or if no check is due at Unix time `now`."""
        now = now or time.time()
        if now < self._next <= now + self._train_s:  # also check if the clock was set back
            return None
        heartbeats = self._attempt.heartbeats()
        description = silent_rank(heartbeats, nodes_of(self._attempt), self._train_s, now - self._began, now)
        idle_s = min((_idle_s(beat, now) for beat in _with_time(heartbeats).values()), default=0.0)
        wait_s = self._train_s - idle_s if idle_s < self._train_s else self._train_s / CHECKS_PER_TIMEOUT
        self._next = now + min(wait_s, self._train_s / 2)
        return description


def nodes_of(attempt: Attempt) -> list[str]:
    """Return the names of an attempt's nodes, ordered by rank; [] if unknown."""
    nodes = attempt.result.get("nodes")
    return [str(node) for node in nodes] if isinstance(nodes, list) else []


def silent_rank(
    heartbeats: Mapping[int, JsonObject],
    nodes: Sequence[str],
    train_s: float,
    ran_s: float,
    now: float,
    other_s: float | None = None,
) -> str | None:
    """If an attempt has stalled, return a message with the rank that stopped first; None if it has not.

    Args:
        heartbeats: the newest heartbeat of each rank.
        nodes: the names of the nodes, ordered by rank.
        train_s: timeout of a training step, seconds.
        ran_s: seconds since the ranks were started.
        now: Unix time.
        other_s: timeout of importing, building, saving and validating; None = OTHER_PHASE_FACTOR * train_s.
    """
    other_s = other_s or OTHER_PHASE_FACTOR * train_s
    timed_heartbeats = _with_time(heartbeats)
    if not timed_heartbeats:
        return f"no rank has started after {other_s:.0f} s" if ran_s > other_s else None
    live_ranks = {rank: beat for rank, beat in timed_heartbeats.items() if beat.get("phase") not in ENDED_PHASES}
    if not live_ranks or min(_idle_s(beat, now) for beat in timed_heartbeats.values()) < train_s:
        return None  # a rank is making progress, so none is stuck
    missing_ranks = _ranks_not_started(nodes, timed_heartbeats) if ran_s > other_s else ""
    if missing_ranks:
        return f"{missing_ranks} not begun after {ran_s:.0f} s, and the others wait"
    frozen = {rank: beat for rank, beat in live_ranks.items() if _is_frozen(beat, train_s, now)}
    late_ranks = []
    for rank, beat in live_ranks.items():
        limit_s = train_s if _has_step_timeout(beat, rank in frozen) else other_s
        if _idle_s(beat, now) > limit_s:
            late_ranks.append(rank)
    if not late_ranks or (len(late_ranks) < len(live_ranks) and not frozen):
        return None
    if frozen:
        return _describe_frozen(frozen, train_s, now)
    # The rank with the fewest steps stopped first, and the others are waiting for it.
    rank = min(live_ranks, key=lambda r: (int(live_ranks[r].get("step", 0)), _progress_time(live_ranks[r])))
    beat = live_ranks[rank]
    ago = f"{_idle_s(beat, now):.0f} s ago, before the others"
    phase = beat.get("phase", "?")
    return f"rank {rank}{_on_host(beat)} is stuck in {phase} since step {beat.get('step', '?')}, {ago}"


def _with_time(heartbeats: Mapping[int, JsonObject]) -> dict[int, JsonObject]:
    """Return the heartbeats that have a time."""
    return {rank: beat for rank, beat in heartbeats.items() if is_number(beat.get("t"))}


def _has_step_timeout(beat: JsonObject, is_frozen: bool) -> bool:
    """Return whether the timeout of a training step applies to a rank; `is_frozen` = it sends no heartbeats.

    During a long save or validation, a live process sends heartbeats. During startup it may send none, since building
    or loading a library can block Python.
    """
    phase = beat.get("phase")
    return phase == "train" or (is_frozen and phase != "start")


def _describe_frozen(frozen_beats: Mapping[int, JsonObject], train_s: float, now: float) -> str:
    rank = min(frozen_beats, key=lambda r: frozen_beats[r]["t"])
    beat = frozen_beats[rank]
    ranks = sorted(r for r, b in frozen_beats.items() if b.get("node", r) == beat.get("node", rank))
    state = f"no longer answers since step {beat.get('step', '?')} ({beat.get('phase', '?')})"
    ago = f"{now - beat['t']:.0f} s ago, before the others"
    if len(ranks) > 1 and now - beat.get("seen", now) > train_s:  # no rank is left to write the node's page
        return f"node {beat.get('host') or beat.get('node')} (ranks {spans(ranks)}) {state}, {ago}"
    return f"rank {rank}{_on_host(beat)} {state}, {ago}"


def _ranks_not_started(nodes: Sequence[str], heartbeats: Mapping[int, JsonObject]) -> str:
    """Return 'rank 5 on node3 has' or 'ranks 8-15 on node2 have' for the ranks without a heartbeat; '' if none."""
    size = max(int(beat.get("size", 0)) for beat in heartbeats.values())
    local_size = max(int(beat.get("local_size", 1)) for beat in heartbeats.values())
    ranks = sorted(set(range(size)) - set(heartbeats))
    if not ranks:
        return ""
    silent_nodes = [nodes[i] for i in sorted({rank // local_size for rank in ranks}) if i < len(nodes)]
    hosts = ""
    if silent_nodes:
        ellipsis = ", ..." if len(silent_nodes) > 4 else ""
        hosts = f" on {', '.join(silent_nodes[:4])}{ellipsis}"
    verb = "have" if len(ranks) > 1 else "has"
    return f"{format_ranks(ranks)}{hosts} {verb}"


def _on_host(beat: JsonObject) -> str:
    return f" on {beat['host']}" if beat.get("host") else ""


def _progress_time(beat: JsonObject) -> float:
    """Return the Unix time of a rank's last progress. Later heartbeats only show that its process is alive."""
    moved_time = beat.get("moved")
    if is_number(moved_time) and moved_time:
        return float(moved_time)
    return float(beat["t"])


def _idle_s(beat: JsonObject, now: float) -> float:
    """Return the seconds since a rank's last progress. The clock of its node may be ahead of the clock here."""
    return max(now, float(beat.get("seen", now))) - _progress_time(beat)


def _is_frozen(beat: JsonObject, train_s: float, now: float) -> bool:
    """Return whether a rank's heartbeat thread is silent too: its process or its node is dead or stopped.

    The page of a node may be as old as its write interval. Therefore the silence must be visible within the page, or
    the page itself must be too old.
    """
    seen_time = float(beat.get("seen", now))
    return now - beat["t"] > train_s and (seen_time - beat["t"] > train_s / 2 or now - seen_time > train_s)
