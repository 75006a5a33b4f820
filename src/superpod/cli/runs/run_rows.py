"""Formats runs for `recipes status`: as rows of a table or, in a narrow terminal, as a few lines per run."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from superpod.cli import tables
from superpod.errors import readable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from superpod.slurm.status.run_views import RunView

STYLE = {"done": "green", "failed": "red", "stalled": "red", "cancelled": "yellow", "running": "cyan", "saving": "cyan"}
HEAD = ("run", "state", "step", "loss", "tokens/s", "MFU", "left", "attempt", "checkpoint")


def name(view: RunView) -> str:
    """Return the name of a run, RECIPE/FOLDER, without control characters."""
    return readable(f"{view.run.recipe}/{view.run.path.name}")


def _cells(view: RunView) -> tuple[str, ...]:
    """Return the cells of a run's row, in the order of HEAD; "-" for unknown values."""
    steps = f"{view.step}/{view.max_steps}" if view.max_steps else str(view.step)
    saved_text = (
        f"step {view.checkpoint_step}, {tables.format_duration(view.checkpoint_age_s)} ago"
        if view.checkpoint_step
        else "-"
    )
    return (
        name(view),
        readable(view.state),
        steps if view.state != "unreadable" else "-",
        "-" if view.loss is None else f"{view.loss:.4f}",
        "-" if view.tokens_per_s is None else f"{view.tokens_per_s:,.0f}",
        "-" if view.mfu is None else f"{view.mfu:.1%}",
        tables.format_duration(view.eta_s),
        view.attempt or "-",
        saved_text,
    )


def table(views: Sequence[RunView], *, with_users: bool = False, selected_row: int | None = None) -> Table:
    """Return a table with a row per run, and optionally a column for its owner; `selected_row` is highlighted."""
    from rich.table import Table
    from rich.text import Text

    rows = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("user", *HEAD) if with_users else HEAD:
        rows.add_column(title, no_wrap=True)
    for i, view in enumerate(views):
        run, state, *rest = _cells(view)
        cells = [Text(run), Text(state, style=STYLE.get(view.state, "red")), *map(Text, rest)]
        user = [Text(readable(view.user))] if with_users else []
        rows.add_row(*user, *cells, style="reverse" if i == selected_row else "")
    return rows


def is_too_wide(rows: Table, width: int) -> bool:
    """Return whether a table is wider than `width` characters."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(width=10_000)
    return Measurement.get(console, console.options, rows).maximum > width


def lines(view: RunView, width: int, *, with_users: bool = False, is_selected: bool = False) -> list[Text]:
    """Return lines of at most `width` characters with the name, the state and the metrics of a run."""
    from rich.console import Console
    from rich.text import Text

    run, state, steps, loss, rate, mfu, left, attempt, saved = _cells(view)
    parts = [
        *([readable(view.user)] if with_users else []),
        f"step {steps}" if steps != "-" else "",
        f"loss {loss}" if loss != "-" else "",
        f"{rate} tokens/s" if rate != "-" else "",
        f"MFU {mfu}" if mfu != "-" else "",
        f"{left} left" if left != "-" else "",
        f"attempt {attempt}" if attempt != "-" else "",
        f"checkpoint {saved}" if saved != "-" else "",
    ]
    unbroken = ", ".join(part.replace(" ", tables.NO_BREAK_SPACE) for part in (state, *filter(None, parts)))
    wrapped_lines = textwrap.wrap(unbroken, max(width, tables.MIN_WIDTH), initial_indent="  ", subsequent_indent="  ")
    body = [Text(line.replace(tables.NO_BREAK_SPACE, " ")) for line in wrapped_lines]
    body[0].stylize(STYLE.get(view.state, "red"), 2, 2 + len(state))
    title = Text(run, style="bold reverse" if is_selected else "bold")
    return [*title.wrap(Console(width=width), width), *body]


def show(views: Sequence[RunView], *, with_users: bool, width: int | None) -> None:
    """Print a table of runs, or a few lines per run if the table is wider than `width` characters (None = no limit)."""
    rows = table(views, with_users=with_users)
    if width is None or not views or not is_too_wide(rows, width):
        tables.print_table(rows)
        return

    console = tables.console()
    for view in views:
        for line in lines(view, width, with_users=with_users):
            console.print(line, soft_wrap=True)


def messages(views: Sequence[RunView]) -> list[str]:
    """Return a line per message and warning of runs."""
    return [
        readable(f"{view.run.path.name}: {message}")
        for view in views
        for message in (view.message, view.alarm, *view.resumed)
        if message
    ]
