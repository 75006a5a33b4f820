"""Format seconds, bytes and rank numbers. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence


def duration(seconds: float) -> str:
    """Return a duration as text with a unit: `12.3 s`, `12 min`, `3.5 h`, `2.1 d`."""
    for unit, size, limit in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86400:.3g} d"


def size(count: float) -> str:
    """Return a number of bytes as text with a unit: `12 B`, `1.5 KiB`, `64.0 MiB`, `1,024.0 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def format_ranks(ranks: Sequence[int]) -> str:
    """Return sorted rank numbers as text: 'rank 3' or 'ranks 3, 8-15'."""
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {spans(ranks)}"


def spans(ranks: Sequence[int]) -> str:
    """Return sorted numbers as text with at most 8 ranges: '3, 8-15'."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], rank]
        else:
            ranges.append([rank])
    parts = ["-".join(map(str, one)) for one in ranges[:8]]
    if len(ranges) > 8:
        parts.append("...")
    return ", ".join(parts)
