"""Read the logs of an attempt by rank. Standard library only.

srun writes `logs/{node}.log`, with the rank before each line (`--label`). A rank that was started without srun, or by
an earlier version of this package, writes `logs/{node}.{rank}.log`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from superpod.common.json_files import TAIL_BYTES, tail_text

_LABEL = re.compile(r" *(\d+): ?(.*)", re.DOTALL)
_NODE_FACTOR = 8
"""`tails` reads this many times more bytes of a node's log than of a rank's log."""


@dataclass(frozen=True)
class Line:
    """A line of a log, and the rank that wrote it; None for lines of slurmstepd and srun."""

    rank: int | None
    text: str


def is_by_node(log: Path) -> bool:
    """Return whether a log contains the lines of all ranks of a node, according to its name."""
    return log.stem.isdecimal()


def rank_of(log: Path) -> int | None:
    """Return the rank in the name of a per-rank log; None for the log of a node and for srun.log."""
    match = re.fullmatch(r"\d+\.(\d+)", log.stem)
    return int(match[1]) if match else None


def node_of(log: Path) -> int | None:
    """Return the index in the job of the node that wrote a log; None for srun.log."""
    match = re.match(r"\d+", log.stem)
    return int(match[0]) if match else None


def parse(log: Path, text: str) -> Line:
    """Return a line of the log `log` as rank and text; the rank is None for lines of slurmstepd."""
    if not is_by_node(log):
        return Line(rank_of(log), text)
    match = _LABEL.fullmatch(text)
    if match is None:
        return Line(None, text)
    return Line(int(match[1]), match[2])


def tails(log: Path) -> list[tuple[int | None, str]]:
    """Return (rank, end of its output) for each rank in a log, by rank; output without a rank (None) comes last."""
    if not is_by_node(log):
        return [(rank_of(log), tail_text(log))]
    ranks: dict[int | None, list[str]] = {}
    for line in tail_text(log, TAIL_BYTES * _NODE_FACTOR).split("\n"):
        parsed_line = parse(log, line)
        ranks.setdefault(parsed_line.rank, []).append(parsed_line.text)
    ordered = sorted(ranks, key=lambda rank: (rank is None, rank or 0))
    return [(rank, "\n".join(ranks[rank])) for rank in ordered]
