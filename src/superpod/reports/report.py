"""The results of a run: a table for the terminal, and an image of its losses. Losses are in nats per token."""

import io
import itertools
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.common import atomic_file
from superpod.common.json_files import JsonObject, is_number, read_json
from superpod.common.units import duration
from superpod.errors import counted
from superpod.reports.runs import run_record
from superpod.reports.runs.loss_summary import LossSummary
from superpod.reports.runs.run_record import Span, Step, median_or_none
from superpod.runtime.runs.run_folder import RunFolder, Status
from superpod.runtime.runs.run_state import State

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

# One color for text, one per kind of mark; all legible in grayscale.
_INK, _FAINT = "#1f2933", "#9aa5b1"
_TRAIN, _VALIDATION, _ENTROPY = "#2563a8", "#d1590b", "#55606b"
MAKER = "superpod-recipes, a picture of losses"
"""Creator in the metadata of our images, the only files that `--plot` overwrites."""
_RUN_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""The color-blind safe palette of Okabe and Ito (jfly.uni-koeln.de/color)."""
MIN_DEVIATION = 0.1
"""Relative deviation from the plan above which `recipes calibrate` is recommended."""


@dataclass(frozen=True)
class Summary:
    """Results of a run: losses in nats per token, times in seconds, memory in GiB; None for unknown values."""

    recipe: str
    path: Path
    status: Status
    attempts: int
    steps: int
    loss_start: float | None
    loss_end: float | None
    """None if the last loss is non-finite"""
    losses: LossSummary
    val_loss: float | None
    val_step: int | None
    """step at which `val_loss` was measured"""
    rehearsal: bool
    """whether it ran on CPUs, so that its times are not representative of GPUs"""
    unigram_entropy_nats: float | None
    tokens: int | None
    tokens_per_s: float | None
    tokens_per_s_per_gpu: float | None
    planned_tokens_per_s_per_gpu: float | None
    """from plan.json; None for a rehearsal"""
    planned_bound: str
    """what limits the step time according to plan.json"""
    peak_allocated_gib: float | None
    wall_time_s: float


def summary(run: RunFolder) -> Summary:
    """Return the results of a run, finished or not. Throughputs are medians without the first step of each attempt."""
    lines, attempts, rehearsal = run.metrics(), run.attempts, run.facts.get("rehearsal") is True
    steps, _ = run_record.read_steps(lines)
    in_steps = run_record.summarize_steps(steps)

    plan = {} if rehearsal else _read_planned_layout(run)
    planned_rate, reasons = plan.get("tokens_per_s_per_gpu"), plan.get("why")
    return Summary(
        recipe=run.recipe,
        path=run.path,
        status=run.status(),
        attempts=len(attempts),
        steps=in_steps.steps,
        loss_start=in_steps.losses.start,
        loss_end=in_steps.losses.end,
        losses=in_steps.losses,
        val_loss=in_steps.val_loss,
        val_step=in_steps.val_step,
        rehearsal=rehearsal,
        unigram_entropy_nats=run.facts.get("unigram_entropy_nats"),
        tokens=None if in_steps.tokens is None else int(in_steps.tokens),
        tokens_per_s=median_or_none(_compute_throughputs(steps)),
        tokens_per_s_per_gpu=in_steps.rate,
        planned_tokens_per_s_per_gpu=planned_rate if is_number(planned_rate) else None,
        planned_bound=str(reasons[0]) if isinstance(reasons, list) and reasons else "",
        peak_allocated_gib=run_record.compute_peak_gib(lines, attempts),
        wall_time_s=sum(_compute_wall_time_s(run_record.read_span(attempt)) for attempt in attempts),
    )


def render(run: Summary) -> "Table":
    """Return the results of a run as a table with two columns, names and values."""
    from rich.table import Table
    from rich.text import Text  # a str would be parsed as markup, but paths and messages may contain brackets

    title = Text(run.recipe, style="table.title")
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in build_rows(run):
        table.add_row(name, Text(value))
    return table


def save_loss_plot(run: RunFolder, path: Path) -> Path:
    """Save a plot of training and validation loss against steps (900 x 500 pixels) to `path`, and return `path`.

    Vertical lines mark the start of later attempts, and a dashed horizontal line the unigram entropy of the data: the
    loss of a model that has learned only token frequencies. Raises OSError if `path` cannot be written.
    """
    figure, axes = _create_figure()
    lines = run.metrics()
    _draw_losses(axes, lines)
    _draw_attempts(axes, lines)
    nats = run.facts.get("unigram_entropy_nats")
    if nats is not None:
        label = f"unigram entropy {nats:.2f}"
        axes.axhline(nats, color=_ENTROPY, linewidth=1.1, linestyle=(0, (5, 4)), label=label, zorder=2)
    _style_axes(axes, run.recipe, _build_caption(lines))
    return _save_figure(figure, path)


def save_runs_plot(runs: list[RunFolder], path: Path) -> Path:
    """Save a plot of the losses of several runs against tokens to `path`, and return `path`.

    With tokens instead of steps, runs of different batch sizes are comparable. Lines are training losses, dots
    validation losses. Raises OSError if `path` cannot be written.
    """
    figure, axes = _create_figure()
    for run, color in zip(runs, itertools.cycle(_RUN_COLORS), strict=False):
        lines = [line for line in run.metrics() if is_number(line.get("tokens"))]
        train = [(line["tokens"], line["loss"]) for line in lines if line.get("loss") is not None]
        validation = [(line["tokens"], line["val_loss"]) for line in lines if line.get("val_loss") is not None]
        if train:
            label = f"{run.recipe} {run.path.name}"
            axes.plot(*zip(*train, strict=True), color=color, linewidth=1.6, label=label, zorder=3)
        if validation:
            axes.plot(*zip(*validation, strict=True), color=color, marker="o", markersize=5, linewidth=0, zorder=4)
    _style_axes(axes, f"{len(runs)} runs", "lines: training, dots: validation")
    axes.set_xlabel("tokens", color=_INK, fontsize=10)
    return _save_figure(figure, path)


def _save_figure(figure: "Figure", path: Path) -> Path:
    """Save a plot atomically, and return `path`. A symbolic link at `path` is replaced, not its target."""
    image = io.BytesIO()
    extension = path.suffix.removeprefix(".")
    figure.savefig(image, format=extension, metadata={"Software" if extension == "png" else "Creator": MAKER})
    atomic_file.write(path, image.getvalue())
    return path


def _create_figure() -> "tuple[Figure, Axes]":
    """Return an empty figure of 900 x 500 pixels with one pair of axes."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(9, 5), dpi=100, facecolor="white", layout=ConstrainedLayoutEngine(w_pad=0.16, h_pad=0.14))
    return figure, figure.add_subplot()


def build_rows(run: Summary) -> list[tuple[str, str]]:
    """Return the rows of the table as (name, value), without unknown values."""
    state = f"{run.status.state}: {run.status.message}" if run.status.message else run.status.state
    pairs = [
        ("state", state),
        ("steps", f"{run.steps:,} in {counted(run.attempts, 'attempt')}"),
        ("loss", run.losses.text),
        ("validation loss", _format_number(run.val_loss, ".4f", f"nats/token at step {run.val_step}")),
        ("unigram entropy", _format_number(run.unigram_entropy_nats, ".4f", "nats/token")),
        ("tokens", _format_number(run.tokens, ",.0f", "")),
        ("throughput", _format_number(run.tokens_per_s, ",.0f", "tokens/s")),
        ("", "(a rehearsal on CPUs: not representative of GPUs)" if run.rehearsal and run.tokens_per_s else ""),
        ("per GPU", "" if run.rehearsal else _format_number(run.tokens_per_s_per_gpu, ",.0f", "tokens/s")),
        ("planned", _compare_with_plan(run)),
        ("", _suggest_calibration(run)),
        ("peak memory", _format_number(run.peak_allocated_gib, ".2f", "GiB per rank")),
        ("wall time", duration(run.wall_time_s)),
        ("folder", str(run.path)),
    ]
    return [(name, value) for name, value in pairs if value]


def _read_planned_layout(run: RunFolder) -> JsonObject:
    """Return the layout of the run from plan.json, with its predictions; {} if there is none."""
    layouts = (read_json(run.path / "plan.json") or {}).get("layouts")
    if isinstance(layouts, list) and layouts and isinstance(layouts[0], dict):
        return layouts[0]
    return {}


def _compare_with_plan(run: Summary) -> str:
    """Return a text such as `1,078 tokens/s per GPU, 18% more than measured; bound by compute`; "" without a plan."""
    planned, measured = run.planned_tokens_per_s_per_gpu, run.tokens_per_s_per_gpu
    if not planned:
        return ""
    text = f"{planned:,.0f} tokens/s per GPU"
    if measured:
        deviation = planned / measured - 1
        text += f", {abs(deviation):.0%} {'more' if deviation > 0 else 'less'} than measured"
    if run.planned_bound:
        text += f"; {run.planned_bound}"
    return text


def _suggest_calibration(run: Summary) -> str:
    """Return the `recipes calibrate` command for a finished run that deviates much from its plan, else ""."""
    planned, measured = run.planned_tokens_per_s_per_gpu, run.tokens_per_s_per_gpu
    if run.status.state != State.DONE or not (planned and measured) or abs(planned / measured - 1) < MIN_DEVIATION:
        return ""
    command = f"recipes calibrate {shlex.quote(str(run.path))} --out mine.toml"
    return f"to plan with the speed of these machines: {command}"


def _format_number(value: float | None, spec: str, unit: str) -> str:
    return "" if value is None else f"{value:{spec}} {unit}".strip()


def _compute_throughputs(steps: Sequence[Step]) -> list[float]:
    """Return the tokens per second over all GPUs, for each steady step."""
    tokens_before = {after.step: step.tokens or 0.0 for step, after in itertools.pairwise(steps)}
    rates = []
    for step in run_record.steady_steps(steps):
        if step.tokens and step.seconds:
            rates.append((step.tokens - tokens_before.get(step.step, 0.0)) / step.seconds)
    return rates


def _compute_wall_time_s(span: Span) -> float:
    """Return the seconds from the start of an attempt to its end or last heartbeat, or until now without either."""
    if span.began is None:
        return 0.0
    return max(0.0, (span.ended or time.time()) - span.began)


def _draw_losses(axes: "Axes", lines: list[JsonObject]) -> None:
    train = [(line["step"], line["loss"]) for line in lines if line.get("loss") is not None]
    validation = [(line["step"], line["val_loss"]) for line in lines if line.get("val_loss") is not None]
    if train:
        style = {"color": _TRAIN, "linewidth": 1.6, "marker": "o" if len(train) == 1 else "", "zorder": 3}
        axes.plot(*zip(*train, strict=True), label="training loss", **style)
    if validation:
        style = {"color": _VALIDATION, "marker": "o", "markersize": 6, "markeredgecolor": "white", "zorder": 4}
        axes.plot(*zip(*validation, strict=True), linewidth=0, label="validation loss", **style)


def _draw_attempts(axes: "Axes", lines: list[JsonObject]) -> None:
    """Draw vertical lines between attempts, labelled with the name of the next attempt."""
    for before, line in itertools.pairwise(lines):
        if before.get("attempt") != line.get("attempt"):
            boundary = (before["step"] + line["step"]) / 2
            axes.axvline(boundary, color=_FAINT, linewidth=0.9, zorder=1)
            name = f" attempt {line.get('attempt', '?')}"
            axes.text(boundary, 0.985, name, transform=axes.get_xaxis_transform(), color=_FAINT, fontsize=8.5, va="top")


def _build_caption(lines: list[JsonObject]) -> str:
    losses = [line["loss"] for line in lines if line.get("loss") is not None]
    if not losses:
        return "no step recorded yet"
    return f"{lines[-1]['step']:,} steps, loss {losses[0]:.3f} \u2192 {losses[-1]:.3f}"


def _style_axes(axes: "Axes", title: str, caption: str) -> None:
    """Set the title and labels, a light grid in the background, and no frame."""
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", color=_INK, pad=12)
    axes.set_title(caption, loc="right", fontsize=10, color=_ENTROPY, pad=12)
    axes.set_xlabel("step", color=_INK, fontsize=10)
    axes.set_ylabel("loss (nats per token)", color=_INK, fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02, y=0.08)
    axes.tick_params(colors=_INK, labelsize=9, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(edgecolor="none", framealpha=0.9, fontsize=9.5, labelcolor=_INK, loc="best")
    else:
        axes.set(xticks=[], yticks=[])
