"""Contents of a live page besides metrics: the state of a run's ranks, and its last log lines."""

from __future__ import annotations

import time
from collections import Counter, deque

from superpod.common.json_files import JsonObject, is_number
from superpod.common.units import duration, format_ranks
from superpod.errors import counted
from superpod.reports.runs.logs import LogReader
from superpod.runtime.heartbeat.heartbeat import ENDED_PHASES
from superpod.runtime.runs.run_folder import RunFolder

SILENT_S = 120.0
"""Seconds without a heartbeat after which a rank is listed. Nodes write heartbeats every 15 s."""
LINES, LOG_BYTES = 40, 64 * 1024
"""Number of log lines to keep, and bytes at the end of a log to read at first."""
LINE_CHARS = 2000


def rate_unit(run: RunFolder) -> str:
    """Return the unit of a run's throughput per rank: per GPU, or per rank for a rehearsal on CPUs."""
    return "tokens/s/rank" if run.facts.get("rehearsal") else "tokens/s/GPU"


def describe_ranks(run: RunFolder, now: float | None = None) -> list[str]:
    """Return lines on the ranks of the latest attempt, from its heartbeats; [] before the first heartbeat.

    They contain the number of ranks per phase, the slowest rank, and ranks without a recent heartbeat. `now` is the
    Unix time, None for the current time.
    """
    now = now or time.time()
    attempts = run.attempts
    newest = attempts[-1].heartbeats() if attempts else {}
    heartbeats = {rank: beat for rank, beat in newest.items() if is_number(beat.get("t"))}
    if not heartbeats:
        return []
    phases = Counter(str(beat.get("phase", "?")) for beat in heartbeats.values())
    nodes = len({beat.get("node", beat.get("host")) for beat in heartbeats.values()})
    size = max(int(beat.get("size") or 0) for beat in heartbeats.values())
    total = f" of {size:,}" if size > len(heartbeats) else ""
    node_text = f" on {counted(nodes, 'node')}" if nodes else ""
    in_phases = ", ".join(f"{count:,} {phase}" for phase, count in phases.most_common())
    sentences = [f"{len(heartbeats):,}{total} ranks{node_text}: {in_phases}"]
    if "ended" not in attempts[-1].result:
        live_ranks = {rank: beat for rank, beat in heartbeats.items() if beat.get("phase") not in ENDED_PHASES}
        sentences += _describe_slowest(live_ranks, now) + _describe_silent(live_ranks, now)
    return sentences


def _describe_slowest(heartbeats: dict[int, JsonObject], now: float) -> list[str]:
    """Describe the rank with the fewest steps and, among those, the longest time since its last step."""
    if len(heartbeats) < 2:
        return []
    steps, moved = {}, {}
    for rank, beat in heartbeats.items():
        steps[rank] = int(beat.get("step") or 0)
        moved[rank] = float(beat["moved"] if is_number(beat.get("moved")) else beat["t"])
    rank = min(heartbeats, key=lambda one: (steps[one], moved[one]))
    behind = max(steps.values()) - steps[rank]
    ago = duration(max(0.0, now - moved[rank]))
    host = f" on {heartbeats[rank]['host']}" if heartbeats[rank].get("host") else ""
    distance = f"{counted(behind, 'step')} behind" if behind else "level with the others"
    return [f"slowest: rank {rank}{host}, step {steps[rank]:,}, {distance}, last progress {ago} ago"]


def _describe_silent(heartbeats: dict[int, JsonObject], now: float) -> list[str]:
    silent = sorted(rank for rank, beat in heartbeats.items() if now - float(beat["t"]) > SILENT_S)
    if not silent:
        return []
    longest_silence = max(now - float(heartbeats[rank]["t"]) for rank in silent)
    return [f"no heartbeat for up to {duration(longest_silence)}: {format_ranks(silent)}"]


class LastLines:
    """The last log lines of rank 0 in the latest attempt; after a failure, also those of srun."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._attempt = run, ""
        self._reader: LogReader | None = None
        self._lines: deque[str] = deque(maxlen=LINES)

    def refresh(self) -> list[str]:
        """Read new lines, and return the last `LINES` lines."""
        attempts = self._run.attempts
        if not attempts:
            self._reader, self._attempt = None, ""
            self._lines.clear()
            return []
        if self._reader is None or attempts[-1].name != self._attempt:
            self._attempt = attempts[-1].name
            self._reader = LogReader(self._run, attempt=self._attempt, last_bytes=LOG_BYTES)
            self._lines.clear()
        for line in self._reader.read_new():
            text = line.partition("] ")[2].strip()
            if text:
                self._lines.append(text[:LINE_CHARS])
        return list(self._lines)
