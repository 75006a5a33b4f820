"""The report of a run for a terminal: tables of figures, and plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from superpod.common.units import duration
from superpod.errors import readable
from superpod.reports import curves
from superpod.reports.curves import Curve
from superpod.reports.report_figures import GOODPUT, Figures, Planned
from superpod.reports.runs.run_record import PRODUCTIVE, Record, Step

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

MAX_WIDTH = 120
"""Maximum width of a plot, in characters."""
MIN_TWO_COLUMN_WIDTH = 90
"""Minimum width of a terminal for two plots side by side."""
FIELDS = (
    ("loss", "loss, nats/token", 8), ("grad_norm", "grad norm", 4), ("lr", "learning rate", 4),
    ("seconds", "step time, s", 4), ("rate", "tokens/s/GPU", 4),
)  # fmt: skip
"""Plots: field of a step, title, height in lines."""
COLUMN_TITLES = (
    *("run", "source", "steps", "loss", "val loss", "p50 s", "p99 s", "tokens/s/GPU", "MFU %", "GiB", "goodput %"),
)
"""Columns of the table that compares several runs."""
TIME_LABELS = {PRODUCTIVE: "productive steps"}
"""Key of `Figures.time_s` -> label, if it differs from the key."""


@dataclass(frozen=True)
class Screen:
    """Width and capabilities of a terminal."""

    width: int
    braille: bool
    """whether it can show braille characters"""
    colors: bool


def build_rows(run: Record, figures: Figures) -> list[tuple[str, str]]:
    """Return the rows after those of `report.build_rows` as (name, value), without unknown values."""
    pairs = (*_build_step_rows(run, figures), *_build_time_rows(run, figures))
    return [(name, value) for name, value in pairs if value]


def build_heading_rows(run: Record, figures: Figures) -> list[tuple[str, str]]:
    """Return the first rows of the report of an external run as (name, value), instead of `report.build_rows`."""
    val = f"{figures.val_loss:.4f} nats/token at step {figures.val_step}" if figures.val_loss is not None else ""
    attempts = f" in {figures.attempts} attempts" if figures.attempts > 1 else ""
    rate = f"{figures.rate:,.0f} tokens/s/GPU" if figures.rate and not run.rehearsal else ""
    pairs = [
        ("source", run.source),
        ("steps", f"{figures.steps:,}{attempts}"),
        ("loss", figures.losses.text),
        ("validation loss", val),
        ("tokens", f"{figures.tokens:,.0f}" if figures.tokens else ""),
        ("throughput", rate),
        ("peak memory", f"{figures.peak_gib:.2f} GiB per rank" if figures.peak_gib else ""),
    ]
    return [(name, value) for name, value in pairs if value]


def _build_step_rows(run: Record, figures: Figures) -> Iterator[tuple[str, str]]:
    yield "left out", run.left_out
    if figures.grad_norm_end is not None:
        yield "grad norm", f"{figures.grad_norm_end:.4g} at the end, {figures.grad_norm_most:.4g} at most"
    if figures.lr_most is not None:
        yield "learning rate", f"{figures.lr_most:.3g} at most, {figures.lr_end:.3g} at the end"
    yield "step time", _describe_step_time(run, figures)
    if figures.mfu is not None:
        hfu = f", HFU {figures.hfu:.1%}" if figures.hfu is not None else ""
        yield "utilization", f"MFU {figures.mfu:.1%}{hfu}, {figures.tflops:,.0f} TFLOP/s per GPU"
        if figures.mfu > 1:
            yield "", "above the peak, so the times, the GPU or the precision are wrong"
        hfu_note = "; HFU also counts full recomputation" if hfu else ""
        yield "", figures.flops_formula + hfu_note
    elif figures.tflops:
        yield "utilization", f"{figures.tflops:,.0f} model TFLOP/s per GPU, {figures.flops_formula}"
    for i, text in enumerate(figures.slow_ranks):
        yield "" if i else "slowest ranks", text
    if not figures.slow_ranks:
        yield "slowest ranks", _describe_equal_ranks(run)


def _describe_step_time(run: Record, figures: Figures) -> str:
    if not figures.step_s:
        return ""
    text = ", ".join(f"{name} {value:.3g} s" for name, value in figures.step_s.items())
    steps_per_line = max(step.count for step in run.steps)
    if steps_per_line > 1:
        text += f" (means of {steps_per_line} steps)"
    if figures.drift is not None:
        direction = "slower" if figures.drift > 0 else "faster"
        text += f"; the last quarter {abs(figures.drift):.1%} {direction} than the first"
    return text


def _describe_equal_ranks(run: Record) -> str:
    """Return a text that no rank is slow; "" if the ranks are unknown."""
    if any(rank.score is not None for rank in run.ranks):
        return f"none of {len(run.ranks)}: all are about equally fast"
    steps = {rank.step for rank in run.ranks}
    if len(run.ranks) > 1 and len(steps) == 1 and steps != {None}:
        return f"none of {len(run.ranks)}: all reached step {next(iter(steps))}"
    return ""


def _build_time_rows(run: Record, figures: Figures) -> Iterator[tuple[str, str]]:
    longest_save = f"; the longest save took {figures.save_s:.3g} s" if figures.save_s else ""
    if figures.saves or longest_save:
        yield "checkpoints", f"{figures.saves} saved{longest_save}"
    if figures.goodput is not None and figures.wall_s:
        yield "goodput", f"{figures.goodput:.1%} of {duration(figures.wall_s)}"
        shares = [
            f"{TIME_LABELS.get(name, name)} {duration(seconds)}"
            for name, seconds in figures.time_s.items()
            if seconds >= 0.005 * figures.wall_s
        ]
        yield "", ", ".join(shares)
        yield "", GOODPUT
        if not run.is_own:
            yield "", "the time before its first log line is unknown"
    if figures.planned is None:
        yield "planned terms", f"not compared: {figures.unplanned}" if figures.unplanned else ""
    else:
        yield from _build_plan_rows(figures.planned, figures.step_s.get("p50"))
    if figures.published is not None:
        published = figures.published
        reached_text = (
            f", of which this run reaches {figures.rate / published.tokens_per_s_per_gpu:.0%}" if figures.rate else ""
        )
        differs = f" ({'; '.join(published.differs)})" if published.differs else ""
        yield "published", f"{published.tokens_per_s_per_gpu:,.0f} tokens/s/GPU{reached_text}{differs}"
        yield "", f"{published.recipe}, {published.release}, {published.source}"
    yield "next", figures.next


def _build_plan_rows(plan: Planned, measured: float | None) -> Iterator[tuple[str, str]]:
    """Yield rows of the planned step time and memory. `measured` is the median step time in seconds."""
    deviation = f"; measured {measured:.3g} s, {measured / plan.step_s - 1:+.0%}" if measured else ""
    yield "planned step", f"{plan.step_time}{deviation}"
    yield "", plan.extrapolation
    if plan.profiled:
        for i, (name, planned_s, measured_s) in enumerate(plan.profiled):
            yield "" if i else "by term", f"{name}: {planned_s:.3g} s planned, {measured_s:.3g} s in its profile"
    else:
        terms = sorted(plan.terms_s.items(), key=lambda term: -term[1])
        yield "", ", ".join(f"{name} {value:.3g} s" for name, value in terms if value >= 0.005 * plan.step_s)
        if measured:
            yield "", f"{measured - plan.step_s:+.3g} s compared with the plan; a profile (--profile torch) shows why"
    stages = [
        f"{planned_gib:.1f} ({measured_gib:.1f} measured)" if measured_gib else f"{planned_gib:.1f}"
        for planned_gib, measured_gib in zip(plan.stages_gib, plan.measured_stages_gib, strict=True)
    ]
    listed_stages = ", ".join(stages[:8]) + (", ..." if len(stages) > 8 else "")
    yield "planned memory", f"{listed_stages} GiB allocated" + (" by pipeline stage" if len(stages) > 1 else "")


def build_comparison_rows(reported: Sequence[tuple[Record, Figures]]) -> list[list[str]]:
    """Return a row per run with the columns `COLUMN_TITLES`; `-` for unknown values."""
    return [
        [
            run.name,
            run.source,
            f"{figures.steps:,}",
            number_or_dash(figures.loss_end, ".4f"),
            number_or_dash(figures.val_loss, ".4f"),
            number_or_dash(figures.step_s.get("p50"), ".3g"),
            number_or_dash(figures.step_s.get("p99"), ".3g"),
            number_or_dash(None if run.rehearsal else figures.rate, ",.0f"),
            number_or_dash(None if figures.mfu is None else 100 * figures.mfu, ".1f"),
            number_or_dash(figures.peak_gib, ".2f"),
            number_or_dash(None if figures.goodput is None else 100 * figures.goodput, ".1f"),
        ]
        for run, figures in reported
    ]


def number_or_dash(value: float | None, spec: str) -> str:
    """Return a number formatted with the format specification `spec`; "-" for None."""
    return "-" if value is None else f"{value:{spec}}"


def build_table(title: str, pairs: Sequence[tuple[str, str]]) -> Table:
    """Return a table of (name, value) pairs; values wrap within their column."""
    from rich.table import Table
    from rich.text import Text  # a str would be parsed as markup, but paths and messages may contain brackets

    report_table = Table(
        title=Text(readable(title), style="table.title"), title_justify="left", show_header=False, box=None
    )
    report_table.pad_edge = False
    report_table.add_column(style="dim", no_wrap=True)
    report_table.add_column(overflow="fold")
    for name, value in pairs:
        report_table.add_row(name, Text(readable(value)))
    return report_table


def draw_curves(runs: Sequence[Record], screen: Screen) -> list[Text]:
    """Return the plots of one or more runs as lines. Without colors, runs differ by their ASCII characters."""
    from rich.text import Text

    braille = screen.braille and (screen.colors or len(runs) == 1)
    width = min(screen.width, MAX_WIDTH)
    narrow = (width - 2) // 2 if width >= MIN_TWO_COLUMN_WIDTH else width
    blocks: list[tuple[bool, list[Text]]] = []
    for name, title, height in FIELDS:
        is_wide = name == "loss" or width < MIN_TWO_COLUMN_WIDTH
        all_curves = [curve for i, run in enumerate(runs) for curve in _build_curves(run, name, i)]
        lines = curves.draw_curves(all_curves, width=width if is_wide else narrow, height=height, braille=braille)
        dots = ", o validation" if any(curve.dots for curve in all_curves) else ""
        if lines:
            blocks.append((is_wide, [Text(title + dots, style="bold"), *lines]))
    return list(_arrange_blocks(blocks, narrow))


def build_legend(runs: Sequence[Record], screen: Screen) -> list[Text]:
    """Return a line per run with its mark in the plots and its name."""
    from rich.text import Text

    braille = screen.braille and (screen.colors or len(runs) == 1)
    marks = ["━━" if braille else curves.LETTERS[i % len(curves.LETTERS)] * 2 for i in range(len(runs))]
    return [
        Text.assemble((mark, curves.COLORS[i % len(curves.COLORS)]), f" {run.name}")
        for i, (mark, run) in enumerate(zip(marks, runs, strict=True))
    ]


def select_steps(run: Record, name: str) -> list[Step]:
    """Return the steps to plot for a field: for times and rates, without the first step of each attempt.

    [] for the rate of a rehearsal, which has no GPUs.
    """
    if run.rehearsal and name == "rate":
        return []
    steps = run.steady if name in ("seconds", "rate") else run.steps
    return [step for step in steps if getattr(step, name) is not None]


def _build_curves(run: Record, name: str, color: int) -> list[Curve]:
    steps = select_steps(run, name)
    drawn_curves = [Curve([step.step for step in steps], [getattr(step, name) for step in steps], color=color)]
    if name == "loss":
        vals = [(step.step, step.val_loss) for step in run.steps if step.val_loss is not None]
        if vals:
            drawn_curves.append(Curve([step for step, _ in vals], [loss for _, loss in vals], dots=True, color=color))
    return drawn_curves


def _arrange_blocks(blocks: Sequence[tuple[bool, list[Text]]], width: int) -> Iterator[Text]:
    """Yield the lines of blocks (is_wide, lines): narrow blocks of `width` characters are placed side by side."""
    from rich.text import Text

    waiting: list[Text] = []
    for is_wide, lines in blocks:
        if is_wide:
            yield from lines
        elif not waiting:
            waiting = lines
        else:
            for left, right in zip(waiting, lines, strict=True):
                left.pad_right(max(0, width + 2 - left.cell_len))
                yield Text.assemble(left, right)
            waiting = []
    yield from waiting
