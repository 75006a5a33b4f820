"""A profile's summary on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from superpod.cli import tables
from superpod.errors import readable
from superpod.profiles.profile_bounds import GROUP_WORDS
from superpod.profiles.profile_classes import WORDS

if TYPE_CHECKING:
    from superpod.profiles.profile_summary import ProfileSummary

NAME = 70
"""Characters of a kernel's name that are shown; --json has all of it."""


def show(summary: ProfileSummary) -> None:
    """Print it: classes, communication, bounds, top kernels, plan, changes."""
    recording, sums = summary.recording, summary.sums
    steps = max(1, sums.steps)
    one = f"{_ms(sums.seconds / steps)} ms"
    what = f"{sums.steps} step{'s' * (sums.steps > 1)} of {one}" if sums.steps else f"{one}, steps unknown"
    rank = f", rank {recording.rank}" if recording.rank is not None else ""
    tool = {"torch": "torch.profiler", "nsys": "Nsight Systems"}[recording.tool]
    tables.say(readable(f"{summary.path}: {tool}, {recording.device}{rank}, {what}"))
    for note in summary.notes:
        tables.say(f"note: {note}")
    _classes(summary, steps)
    _bounds(summary)
    _top(summary, steps)
    _plan(summary)
    _changes(summary)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def _unit(summary: ProfileSummary) -> str:
    return "ms/step" if summary.sums.steps else "ms"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, title in enumerate(titles):
        table.add_column(title, justify="right" if i in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # a str would be read as markup; names of kernels hold brackets
    print()
    tables.show(table)


def _classes(summary: ProfileSummary, steps: int) -> None:
    sums = summary.sums
    unit = _unit(summary)
    words = WORDS if summary.recording.on_gpu else WORDS | {"idle": "between operations", "gaps": "launch gaps"}
    rows = [
        (words[name], _ms(seconds / steps), f"{seconds / sums.seconds:.1%}")
        for name, seconds in sums.classes.items()
        if seconds or summary.recording.on_gpu
    ]
    total = sum(sums.classes.values())
    _table(("class", unit, "share"), [*rows, ("sum", _ms(total / steps), f"{total / sums.seconds:.1%}")], (1, 2))
    named = {group: seconds for group, seconds in sums.exposed.items() if group}
    for group, seconds in sorted(named.items(), key=lambda item: -item[1]):
        print(f"  exposed {GROUP_WORDS[group]}: {_ms(seconds / steps)} {unit}")
    if sums.hidden_s:
        print(f"communication hidden beside computation: {_ms(sums.hidden_s / steps)} {unit}")


def _bounds(summary: ProfileSummary) -> None:
    if not summary.bounds:
        return
    rows = [
        (
            bound.name,
            "not measured" if bound.value is None else f"{bound.value:.1%}",
            bound.usual,
            {True: "ok", False: "look", None: "-"}[bound.fine],
            bound.words,
        )
        for bound in summary.bounds
    ]
    print()
    tables.show_folded(("bound", "here", "usual", "", "what it says"), rows, fold=4, least=24)


def _top(summary: ProfileSummary, steps: int) -> None:
    sums = summary.sums
    rows = []
    for top in sums.top:
        name = readable(top.name)
        short = name if len(name) <= NAME else f"{name[: NAME - 3]}..."
        calls = "" if top.calls is None else f"{top.calls / steps:,.0f}"
        rows.append((_ms(top.seconds / steps), calls, top.kind + (" (TC)" if top.tensor_cores else ""), short))
    if rows:
        what = "kernel" if summary.recording.on_gpu else "operation"
        _table((_unit(summary), "calls", "class", what), rows, (0, 1))


def _plan(summary: ProfileSummary) -> None:
    if summary.planned is None:
        return
    rows = [(row.name, _ms(row.planned_s), _ms(row.measured_s), _off(row.planned_s, row.measured_s))
            for row in summary.rows]  # fmt: skip
    planned, measured = (sum(getattr(row, key) for row in summary.rows) for key in ("planned_s", "measured_s"))
    rows.append(("step", _ms(planned), _ms(measured), _off(planned, measured)))
    print()
    tables.say(readable(f"planned: {summary.planned.source}"))
    _table(("term, ms of a step", "planned", "measured", "off"), rows, (1, 2, 3))


def _off(planned: float, measured: float) -> str:
    if planned <= 0:
        return "-"
    return f"{measured / planned - 1:+.0%}" if measured < 10 * planned else f"x {measured / planned:,.0f}"


def _changes(summary: ProfileSummary) -> None:
    if not summary.changes:
        return
    print()
    print("to change next:")
    for number, change in enumerate(summary.changes, 1):
        gain = f"up to {_ms(change.seconds)} ms a step" if change.seconds else "within what is usual"
        tables.say(readable(f"{number}. {change.what} ({gain}): {change.why}"))
        tables.say(readable(f"  next: {change.how}"))
