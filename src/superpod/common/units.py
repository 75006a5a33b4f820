"""Seconds and bytes in words. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence


def duration(seconds: float) -> str:
    """`12.3 s`, `40 s`, `12 min`, `3.5 h`, `2.1 d`."""
    for unit, size, most in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if seconds < most:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86400:.3g} d"


def size(count: float) -> str:
    """Of so many bytes: `12 B`, `1.5 KiB`, `64.0 MiB`, `1,024.0 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def format_ranks(ranks: Sequence[int]) -> str:
    """'rank 3', 'ranks 3, 8-15' for sorted numbers."""
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def spans(ranks: Sequence[int]) -> str:
    """'3, 8-15' for sorted numbers."""
    rows: list[list[int]] = []
    for rank in ranks:
        if rows and rank == rows[-1][-1] + 1:
            rows[-1] = [rows[-1][0], rank]
        else:
            rows.append([rank])
    shown = ["-".join(map(str, row)) for row in rows[:8]]
    return ", ".join(shown) + (", ..." if len(rows) > 8 else "")
