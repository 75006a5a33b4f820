"""Read the logs of an attempt by rank, from one file per node with the rank before each line, or one file per rank.

srun writes `logs/{node}.log` (`--label`). A rank that was not started by srun, or by an earlier version, writes
`logs/{node}.{rank}.log`. Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from superpod.common.json_files import TAIL_BYTES, tail_text

_LABEL = re.compile(r" *(\d+): ?(.*)", re.DOTALL)
_NODE_FACTOR = 8
"""How many times more bytes are read from the end of a node's file than from the end of a rank's file."""


@dataclass(frozen=True)
class Line:
    """A line of a log, and the rank that wrote it; None for slurmstepd and srun."""

    rank: int | None
    text: str


def is_by_node(log: Path) -> bool:
    """Return whether a log contains the lines of all ranks of a node."""
    return log.stem.isdecimal()


def rank_of(log: Path) -> int | None:
    """Return the rank of a per-rank log; None for the log of a node and for srun.log."""
    match = re.fullmatch(r"\d+\.(\d+)", log.stem)
    return int(match[1]) if match else None


def node_of(log: Path) -> int | None:
    """Return the index of the node in the job; None for srun.log."""
    match = re.match(r"\d+", log.stem)
    return int(match[0]) if match else None


def parse(log: Path, text: str) -> Line:
    """Split a line of this log into rank and text; lines of slurmstepd have no rank."""
    if not is_by_node(log):
        return Line(rank_of(log), text)
    match = _LABEL.fullmatch(text)
    if match is None:
        return Line(None, text)
    return Line(int(match[1]), match[2])


def tails(log: Path) -> list[tuple[int | None, str]]:
    """Return the end of each rank's output in this log, ordered by rank; lines without a rank come last."""
    by_node = is_by_node(log)
    text = tail_text(log, TAIL_BYTES * (_NODE_FACTOR if by_node else 1))
    if not by_node:
        return [(rank_of(log), text)]
    ranks: dict[int | None, list[str]] = {}
    for line in text.split("\n"):
        parsed_line = parse(log, line)
        ranks.setdefault(parsed_line.rank, []).append(parsed_line.text)
    ordered = sorted(ranks, key=lambda rank: (rank is None, rank or 0))
    return [(rank, "\n".join(ranks[rank])) for rank in ordered]
