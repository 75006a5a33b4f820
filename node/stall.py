"""Name the rank that stopped first, from the heartbeats alone. Standard library only."""

from __future__ import annotations

import time

from superpod.node.files import is_number
from superpod.node.run_folder import Attempt

STARTING = 10
"""Importing, building, saving and validating may take this many times as long as a training step."""

ENDED = ("done", "stopped", "ended", "failed")


def first_silent(
    attempt: Attempt, train_s: float, began: float, now: float | None = None, other_s: float | None = None
) -> str:
    """In words, the rank that stopped first when an attempt has made no progress for too long; '' when all is well.

    `train_s` is what a training rank may take between two steps; `other_s` what importing, building, saving and
    validating may take, `STARTING` times as long unless said. `began` (Unix time) is when the ranks were started.
    """
    now, other_s = now or time.time(), other_s or STARTING * train_s
    beats = {rank: beat for rank, beat in attempt.heartbeats().items() if is_number(beat.get("t"))}
    if not beats:
        return f"no rank has begun after {other_s:.0f} s" if now - began > other_s else ""
    if all(beat.get("phase") in ENDED for beat in beats.values()):
        return ""
    # Frozen: even the heartbeat's thread is silent, so the process is gone or stopped. A rank that merely waits for
    # the others still beats, but does not move.
    moving = [rank for rank, beat in beats.items() if now - _moved(beat) <= _limit(beat, train_s, other_s)]
    frozen = {r: b for r, b in beats.items() if now - b["t"] > train_s and b.get("phase") not in ENDED}
    if moving and not frozen:
        return ""
    if len(moving) == len(beats):
        return ""
    if moving and min(now - _moved(b) for b in beats.values()) < train_s:
        return ""  # some rank makes steps, so none is stuck
    # Of those that wait, the first to stop is the one with the fewest steps: the others wait for it.
    rank = min(frozen, key=lambda r: frozen[r]["t"]) if frozen else min(beats, key=lambda r: _key(beats[r]))
    beat = beats[rank]
    host = f" on {beat['host']}" if beat.get("host") else ""
    what = "no longer answers" if rank in frozen else f"is stuck in {beat.get('phase', '?')}"
    silent = now - (beat["t"] if rank in frozen else _moved(beat))
    return f"rank {rank}{host} {what} since step {beat.get('step', '?')}, {silent:.0f} s ago, before the others"


def _moved(beat: dict) -> float:
    """Unix time of the rank's last progress; beats in between only show that it lives."""
    moved = beat.get("moved")
    return float(moved) if is_number(moved) and moved else float(beat["t"])


def _key(beat: dict) -> tuple[int, float]:
    return int(beat.get("step", 0)), _moved(beat)


def _limit(beat: dict, train_s: float, other_s: float) -> float:
    return train_s if beat.get("phase") == "train" else other_s
