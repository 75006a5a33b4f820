"""What a page that refreshes shows of a run beside its metrics: its ranks, and the last lines of its log."""

from __future__ import annotations

import time
from collections import Counter, deque

from superpod.common.files import JsonObject, is_number
from superpod.common.units import duration
from superpod.errors import counted
from superpod.reports.runs.logs import Reader
from superpod.runtime.heartbeat import stall
from superpod.runtime.heartbeat.heartbeat import ENDED
from superpod.runtime.runs.run_folder import RunFolder

SILENT_S = 120.0
"""A rank without a sign of life for so long is named; nodes write every 15 s (`heartbeat.write_every_s`)."""
LINES, LOG_BYTES = 40, 64 * 1024
"""Lines of a log that are kept, and bytes of its end that are read at first."""
LINE_CHARS = 2000


def rate_unit(run: RunFolder) -> str:
    """The unit of a run's throughput: a rank of a rehearsal runs on CPUs, and has no GPU to be named after."""
    return "tokens/s/rank" if run.facts.get("rehearsal") else "tokens/s/GPU"


def describe_ranks(run: RunFolder, now: float | None = None) -> list[str]:
    """Sentences about the ranks of the newest attempt, from its heartbeats; empty before the first.

    How many in which phase, the one that is furthest behind, and those without a sign of life.
    """
    now = now or time.time()
    attempts = run.attempts
    newest = attempts[-1].heartbeats() if attempts else {}
    beats = {rank: beat for rank, beat in newest.items() if is_number(beat.get("t"))}
    if not beats:
        return []
    phases = Counter(str(beat.get("phase", "?")) for beat in beats.values())
    nodes = len({beat.get("node", beat.get("host")) for beat in beats.values()})
    size = max(int(beat.get("size") or 0) for beat in beats.values())
    of = f" of {size:,}" if size > len(beats) else ""
    where = f" on {counted(nodes, 'node')}" if nodes else ""
    words = [
        f"{len(beats):,}{of} ranks{where}: " + ", ".join(f"{count:,} {phase}" for phase, count in phases.most_common())
    ]
    live = {rank: beat for rank, beat in beats.items() if beat.get("phase") not in ENDED}
    return words + (_slowest(live, now) + _silent(live, now) if "ended" not in attempts[-1].result else [])


def _slowest(beats: dict[int, JsonObject], now: float) -> list[str]:
    """The rank with the fewest steps, and of several the one that has moved least lately."""
    if len(beats) < 2:
        return []
    steps = {rank: int(beat.get("step") or 0) for rank, beat in beats.items()}
    moved = {rank: float(beat["moved"] if is_number(beat.get("moved")) else beat["t"]) for rank, beat in beats.items()}
    rank = min(beats, key=lambda one: (steps[one], moved[one]))
    behind = max(steps.values()) - steps[rank]
    ago = duration(max(0.0, now - moved[rank]))
    host = f" on {beats[rank]['host']}" if beats[rank].get("host") else ""
    far = f"{counted(behind, 'step')} behind" if behind else "level with the others"
    return [f"slowest: rank {rank}{host}, step {steps[rank]:,}, {far}, moved {ago} ago"]


def _silent(beats: dict[int, JsonObject], now: float) -> list[str]:
    silent = sorted(rank for rank, beat in beats.items() if now - float(beat["t"]) > SILENT_S)
    if not silent:
        return []
    longest = max(now - float(beats[rank]["t"]) for rank in silent)
    return [f"no sign of life for up to {duration(longest)}: rank{'s' if silent[1:] else ''} {stall.spans(silent)}"]


class LastLines:
    """The last lines that the newest attempt's first rank wrote; of one that failed, srun's words too."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._attempt = run, ""
        self._reader: Reader | None = None
        self._lines: deque[str] = deque(maxlen=LINES)

    def look(self) -> list[str]:
        """The lines, after what is new was read."""
        attempts = self._run.attempts
        if not attempts:
            self._reader, self._attempt = None, ""
            self._lines.clear()
            return []
        if self._reader is None or attempts[-1].name != self._attempt:
            self._attempt = attempts[-1].name
            self._reader = Reader(self._run, attempt=self._attempt, last_bytes=LOG_BYTES)
            self._lines.clear()
        for line in self._reader.new():
            if words := line.partition("] ")[2].strip():
                self._lines.append(words[:LINE_CHARS])
        return list(self._lines)
