"""Prints the summary of a profile on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from superpod.cli import tables
from superpod.errors import counted, readable
from superpod.profiles.profile_bounds import GROUP_WORDS
from superpod.profiles.profile_classes import WORDS

if TYPE_CHECKING:
    from superpod.profiles.profile_summary import ProfileSummary

MAX_NAME_LENGTH = 70
"""Maximum length of a kernel name in the table. --json prints complete names."""


def show(summary: ProfileSummary) -> None:
    """Print the time per kernel class, typical values, top kernels, the plan and suggested changes."""
    recording, sums = summary.recording, summary.sums
    steps = max(1, sums.steps)
    duration = f"{_ms(sums.seconds / steps)} ms"
    extent = f"{counted(sums.steps, 'step')} of {duration}" if sums.steps else f"{duration}, number of steps unknown"
    rank = f", rank {recording.rank}" if recording.rank is not None else ""
    tool = {"torch": "torch.profiler", "nsys": "Nsight Systems"}[recording.tool]
    tables.print_wrapped(readable(f"{summary.path}: {tool}, {recording.device}{rank}, {extent}"))
    for note in summary.notes:
        tables.print_wrapped(f"note: {note}")
    _print_classes(summary, steps)
    _print_bounds(summary)
    _print_top_kernels(summary, steps)
    _print_plan(summary)
    _print_changes(summary)


def _ms(seconds: float) -> str:
    """Format a time in milliseconds, without the unit."""
    return f"{seconds * 1e3:,.2f}"


def _unit(summary: ProfileSummary) -> str:
    """Return the unit of times: per step, if the number of steps is known."""
    return "ms/step" if summary.sums.steps else "ms"


def _print_table(titles: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> None:
    """Print an empty line and a table; the columns with indices `right` are right-aligned."""
    print()
    tables.print_rows(titles, rows, right=right)


def _print_classes(summary: ProfileSummary, steps: int) -> None:
    """Print the time per kernel class, and how much communication is exposed and overlapped."""
    sums = summary.sums
    unit = _unit(summary)
    names = WORDS if summary.recording.on_gpu else WORDS | {"idle": "between operations", "gaps": "launch gaps"}
    rows = [
        (names[name], _ms(seconds / steps), f"{seconds / sums.seconds:.1%}")
        for name, seconds in sums.classes.items()
        if seconds or summary.recording.on_gpu
    ]
    total = sum(sums.classes.values())
    rows.append(("sum", _ms(total / steps), f"{total / sums.seconds:.1%}"))
    _print_table(("class", unit, "share"), rows, (1, 2))
    exposed_s = {group: seconds for group, seconds in sums.exposed.items() if group}
    for group, seconds in sorted(exposed_s.items(), key=lambda item: -item[1]):
        print(f"  exposed {GROUP_WORDS[group]}: {_ms(seconds / steps)} {unit}")
    if sums.hidden_s:
        print(f"communication overlapped with computation: {_ms(sums.hidden_s / steps)} {unit}")


def _print_bounds(summary: ProfileSummary) -> None:
    """Print each quantity with its usual range."""
    if not summary.bounds:
        return
    rows = [
        (
            bound.name,
            "not measured" if bound.value is None else f"{bound.value:.1%}",
            bound.usual,
            {True: "ok", False: "check", None: "-"}[bound.fine],
            bound.words,
        )
        for bound in summary.bounds
    ]
    print()
    tables.print_folded_table(("quantity", "here", "usual", "", "meaning"), rows, fold=4, min_width=24)


def _print_top_kernels(summary: ProfileSummary, steps: int) -> None:
    sums = summary.sums
    rows = []
    for top in sums.top:
        name = readable(top.name)
        short = name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 3]}..."
        calls = "" if top.calls is None else f"{top.calls / steps:,.0f}"
        kind = f"{top.kind} (TC)" if top.tensor_cores else top.kind
        rows.append((_ms(top.seconds / steps), calls, kind, short))
    if rows:
        title = "kernel" if summary.recording.on_gpu else "operation"
        _print_table((_unit(summary), "calls", "class", title), rows, (0, 1))


def _print_plan(summary: ProfileSummary) -> None:
    """Print planned and measured times per step."""
    if summary.planned is None:
        return
    times = [(row.name, row.planned_s, row.measured_s) for row in summary.rows]
    times.append(("step", sum(row.planned_s for row in summary.rows), sum(row.measured_s for row in summary.rows)))
    rows = [(name, _ms(planned), _ms(measured), _difference(planned, measured)) for name, planned, measured in times]
    print()
    tables.print_wrapped(readable(f"planned: {summary.planned.source}"))
    _print_table(("term, ms/step", "planned", "measured", "difference"), rows, (1, 2, 3))


def _difference(plan: float, measurement: float) -> str:
    """Return the measured time relative to the plan: "+20%", or "x 12" from a factor of 10; "-" without a plan."""
    if plan <= 0:
        return "-"
    if measurement >= 10 * plan:
        return f"x {measurement / plan:,.0f}"
    return f"{measurement / plan - 1:+.0%}"


def _print_changes(summary: ProfileSummary) -> None:
    if not summary.changes:
        return
    print()
    print("suggested changes:")
    for number, change in enumerate(summary.changes, 1):
        gain = f"up to {_ms(change.seconds)} ms per step" if change.seconds else "within the usual range"
        tables.print_wrapped(readable(f"{number}. {change.what} ({gain}): {change.why}"))
        tables.print_wrapped(readable(f"  next: {change.how}"))
