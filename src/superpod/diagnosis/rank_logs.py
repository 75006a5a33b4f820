"""The logs of an attempt by rank: from a file a node, with the rank before each line, or from a file a rank.

`logs/{node}.log` is written by srun (`--label`), `logs/{node}.{rank}.log` by a rank itself where no srun starts it, and
by earlier versions. Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from superpod.common.files import TAIL_BYTES, tail_text

_LABEL = re.compile(r" *(\d+): ?(.*)", re.DOTALL)
_MOST_RANKS = 8
"""A node's file is read so many times further back than a rank's."""


@dataclass(frozen=True)
class Line:
    """A line of a log: who wrote it, None where no rank did."""

    rank: int | None
    text: str


def is_by_node(log: Path) -> bool:
    """Whether a log has the lines of all ranks of a node."""
    return log.stem.isdecimal()


def rank_of(log: Path) -> int | None:
    """The rank of a log of its own; None for a node's and for srun.log."""
    match = re.fullmatch(r"\d+\.(\d+)", log.stem)
    return int(match[1]) if match else None


def node_of(log: Path) -> int | None:
    """The node's number in the job; None for srun.log."""
    match = re.match(r"\d+", log.stem)
    return int(match[0]) if match else None


def parse(log: Path, text: str) -> Line:
    """A line of this log with its rank; slurmstepd's own words have none."""
    if not is_by_node(log):
        return Line(rank_of(log), text)
    match = _LABEL.fullmatch(text)
    return Line(int(match[1]), match[2]) if match else Line(None, text)


def tails(log: Path) -> list[tuple[int | None, str]]:
    """The end of what each rank has written to this log, by rank; words of no rank last."""
    by_node = is_by_node(log)
    text = tail_text(log, TAIL_BYTES * (_MOST_RANKS if by_node else 1))
    if not by_node:
        return [(rank_of(log), text)]
    ranks: dict[int | None, list[str]] = {}
    for line in text.split("\n"):
        parsed = parse(log, line)
        ranks.setdefault(parsed.rank, []).append(parsed.text)
    ordered = sorted(ranks, key=lambda rank: (rank is None, rank or 0))
    return [(rank, "\n".join(ranks[rank])) for rank in ordered]
