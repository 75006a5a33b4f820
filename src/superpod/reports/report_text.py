"""A report for the terminal: a table of figures, and curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from superpod.common.units import duration
from superpod.errors import readable
from superpod.reports import curves
from superpod.reports.curves import Curve
from superpod.reports.report_figures import GOODPUT, Figures
from superpod.reports.runs.run_record import Record, Step

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

WIDEST = 120
"""Columns of curves."""
BESIDE = 90
"""Columns from which on two curves stand side by side."""
FIELDS = (
    ("loss", "loss, nats/token", 8), ("grad_norm", "grad norm", 4), ("lr", "learning rate", 4),
    ("seconds", "step time, s", 4), ("rate", "tokens/s/GPU", 4),
)  # fmt: skip
"""What is drawn: field of a step, title, lines."""


TITLES = (
    *("run", "source", "steps", "loss", "val loss", "p50 s", "p99 s", "tokens/s/GPU", "MFU %", "GiB", "goodput %"),
)
"""Columns of the table that compares several runs."""


@dataclass(frozen=True)
class Screen:
    """What a terminal shows."""

    width: int
    braille: bool
    """whether it has braille letters"""
    colors: bool


def rows(run: Record, figures: Figures) -> list[tuple[str, str]]:
    """Names and values beyond those of `report.render`, in reading order; unknown ones are left out."""
    return [(name, value) for name, value in (*_of_steps(run, figures), *_of_time(run, figures)) if value]


def heading(run: Record, figures: Figures) -> list[tuple[str, str]]:
    """What a run of others begins with: `report.render` has it of our own."""
    val = f"{figures.val_loss:.4f} nats/token at step {figures.val_step}" if figures.val_loss is not None else ""
    attempts = f" in {figures.attempts} attempts" if figures.attempts > 1 else ""
    rate = f"{figures.rate:,.0f} tokens/s/GPU" if figures.rate and not run.rehearsal else ""
    pairs = [
        ("source", run.source),
        ("steps", f"{figures.steps:,}{attempts}"),
        ("loss", figures.losses.words),
        ("validation loss", val),
        ("tokens", f"{figures.tokens:,.0f}" if figures.tokens else ""),
        ("throughput", rate),
        ("peak memory", f"{figures.peak_gib:.2f} GiB per rank" if figures.peak_gib else ""),
    ]
    return [(name, value) for name, value in pairs if value]


def _of_steps(run: Record, f: Figures) -> Iterator[tuple[str, str]]:
    yield "left out", run.left_out
    if f.grad_norm_end is not None:
        yield "grad norm", f"{f.grad_norm_end:.4g} at the end, {f.grad_norm_most:.4g} at most"
    yield "learning rate", f"{f.lr_most:.3g} at most, {f.lr_end:.3g} at the end" if f.lr_most is not None else ""
    times = ", ".join(f"{name} {value:.3g} s" for name, value in f.step_s.items())
    if times and (mean := max(step.count for step in run.steps)) > 1:
        times += f" (means of {mean} steps)"
    if f.drift is not None:
        times += f"; the last quarter {abs(f.drift):.1%} {'slower' if f.drift > 0 else 'faster'} than the first"
    yield "step time", times
    if f.mfu is not None:
        hfu = f", HFU {f.hfu:.1%}" if f.hfu is not None else ""
        yield "utilization", f"MFU {f.mfu:.1%}{hfu}, {f.tflops:,.0f} TFLOP/s per GPU"
        if f.mfu > 1:
            yield "", "more than the GPU can: the times are wrong, or it is another GPU or precision"
        yield "", f.flops_formula + "; HFU counts what full recomputation repeats too" * bool(hfu)
    elif f.tflops:
        yield "utilization", f"{f.tflops:,.0f} model TFLOP/s per GPU, {f.flops_formula}"
    for i, words in enumerate(f.slow_ranks):
        yield "" if i else "slowest ranks", words
    if run.ranks and not f.slow_ranks:
        steps = {rank.step for rank in run.ranks}
        scored = any(rank.score is not None for rank in run.ranks)
        if scored or (len(run.ranks) > 1 and len(steps) == 1 and steps != {None}):
            yield (
                "slowest ranks",
                f"none of {len(run.ranks)}: "
                + ("all are about as fast" if scored else f"all came to step {next(iter(steps))}"),
            )


def _of_time(run: Record, f: Figures) -> Iterator[tuple[str, str]]:
    longest = f"; the longest save took {f.save_s:.3g} s" if f.save_s else ""
    yield "checkpoints", f"{f.saves} saved{longest}" if f.saves or longest else ""
    if f.goodput is not None and f.wall_s:
        yield "goodput", f"{f.goodput:.1%} of {duration(f.wall_s)}"
        lost = [f"{name} {duration(s)}" for name, s in f.time_s.items() if s >= 0.005 * f.wall_s]
        yield "", ", ".join(lost)
        yield "", GOODPUT.removeprefix("goodput: ")
        if not run.is_own:
            yield "", "its log says nothing of what was before it"
    yield from _of_plan(f)
    if p := f.published:
        against = f", {f.rate / p.tokens_per_s_per_gpu:.0%} of it here" if f.rate else ""
        differs = f" ({'; '.join(p.differs)})" if p.differs else ""
        yield "published", f"{p.tokens_per_s_per_gpu:,.0f} tokens/s/GPU{against}{differs}"
        yield "", f"{p.recipe}, {p.release}, {p.source}"
    yield "next", f.next


def _of_plan(f: Figures) -> Iterator[tuple[str, str]]:
    if (p := f.planned) is None:
        yield "planned terms", f"not compared: {f.unplanned}" if f.unplanned else ""
        return
    measured = f.step_s.get("p50")
    off = f"; measured {measured:.3g} s, {measured / p.step_s - 1:+.0%}" if measured else ""
    yield "planned step", f"{p.step_s:.3g} s{off}"
    if p.profiled:
        for i, (name, planned, own) in enumerate(p.profiled):
            yield "" if i else "by term", f"{name}: {planned:.3g} s planned, {own:.3g} s in its profile"
    else:
        terms = sorted(p.terms_s.items(), key=lambda term: -term[1])
        yield "", ", ".join(f"{name} {value:.3g} s" for name, value in terms if value >= 0.005 * p.step_s)
        if measured:
            yield "", f"beyond the plan {measured - p.step_s:+.3g} s: a profile tells which term (--profile torch)"
    stages = [
        f"{planned:.1f}" + (f" ({own:.1f} measured)" if own else "")
        for planned, own in zip(p.stages_gib, p.measured_stages_gib, strict=True)
    ]
    shown = ", ".join(stages[:8]) + (", ..." if len(stages) > 8 else "")
    yield "planned memory", f"{shown} GiB allocated" + (" by pipeline stage" if len(stages) > 1 else "")


def comparison_rows(reported: Sequence[tuple[Record, Figures]]) -> list[list[str]]:
    """One row of TITLES per run; `-` for unknown values."""
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


def number_or_dash(value: float | None, form: str) -> str:
    """Format a number with Python's format specification `form`; `-` for None."""
    return "-" if value is None else f"{value:{form}}"


def table(title: str, pairs: Sequence[tuple[str, str]]) -> Table:
    """Names and values as a table of two columns; values wrap below each other."""
    from rich.table import Table
    from rich.text import Text  # a str would be read as markup; paths and messages may hold brackets

    shown = Table(title=Text(readable(title), style="table.title"), title_justify="left", show_header=False, box=None)
    shown.pad_edge = False
    shown.add_column(style="dim", no_wrap=True)
    shown.add_column(overflow="fold")
    for name, value in pairs:
        shown.add_row(name, Text(readable(value)))
    return shown


def draw_curves(runs: Sequence[Record], screen: Screen) -> list[Text]:
    """The curves of one run or of several in one picture; several without colours are told by their letters."""
    from rich.text import Text

    braille = screen.braille and (screen.colors or len(runs) == 1)
    width = min(screen.width, WIDEST)
    narrow = (width - 2) // 2 if width >= BESIDE else width
    blocks: list[tuple[bool, list[Text]]] = []
    for name, title, height in FIELDS:
        is_wide = name == "loss" or width < BESIDE
        pictures = [picture for i, run in enumerate(runs) for picture in _curves(run, name, i)]
        lines = curves.draw(pictures, width=width if is_wide else narrow, height=height, braille=braille)
        dots = ", o validation" if any(picture.dots for picture in pictures) else ""
        if lines:
            blocks.append((is_wide, [Text(title + dots, style="bold"), *lines]))
    return list(_arranged(blocks, narrow))


def legend(runs: Sequence[Record], screen: Screen) -> list[Text]:
    """Which curve is whose."""
    from rich.text import Text

    braille = screen.braille and (screen.colors or len(runs) == 1)
    marks = ["━━" if braille else curves.LETTERS[i % len(curves.LETTERS)] * 2 for i in range(len(runs))]
    return [
        Text.assemble((mark, curves.COLORS[i % len(curves.COLORS)]), f" {run.name}")
        for i, (mark, run) in enumerate(zip(marks, runs, strict=True))
    ]


def series(run: Record, name: str) -> list[Step]:
    """The steps that a curve of this field goes through; times and rates without an attempt's first step.

    A rehearsal has no rate of a GPU.
    """
    if run.rehearsal and name == "rate":
        return []
    steps = run.steady if name in ("seconds", "rate") else run.steps
    return [step for step in steps if getattr(step, name) is not None]


def _curves(run: Record, name: str, color: int) -> list[Curve]:
    steps = series(run, name)
    drawn = [Curve([step.step for step in steps], [getattr(step, name) for step in steps], color=color)]
    vals = [step for step in run.steps if step.val_loss is not None] if name == "loss" else []
    if vals:
        drawn.append(Curve([s.step for s in vals], [s.val_loss or 0.0 for s in vals], dots=True, color=color))
    return drawn


def _arranged(blocks: Sequence[tuple[bool, list[Text]]], width: int) -> Iterator[Text]:
    """Wide blocks below each other, narrow ones in pairs."""
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
