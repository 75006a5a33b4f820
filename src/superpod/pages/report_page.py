"""Renders the HTML page of a report on one run or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from superpod.common.units import duration
from superpod.errors import UserError
from superpod.pages.page import Page, render
from superpod.pages.report_plots import Line, Part, get_color, plot_bars, plot_curves
from superpod.reports import report_text
from superpod.reports.report_figures import GOODPUT, Figures
from superpod.reports.runs.run_record import Record

if TYPE_CHECKING:
    from bokeh.plotting import figure

MAX_POINTS = 4000
"""Maximum number of points in a curve; longer runs are subsampled."""
MAX_RUNS = 7
"""Maximum number of runs on a page, limited by the number of colors."""
CURVES = {
    "loss": ("nats/token", "Loss", "Dots: validation. Dashed lines (single run only): start of a later attempt."),
    "grad_norm": ("grad norm", "Gradient norm", "Before clipping."),
    "lr": ("learning rate", "Learning rate", ""),
    "seconds": ("s", "Step time", "Without the first step of each attempt, which compiles kernels."),
    "rate": ("tokens/s/GPU", "Throughput per GPU", "Without the first step of each attempt."),
}
"""{field of a step: (unit, title and caption of its curve)}."""
TIME_COLORS = {
    "steps that count": "#4477aa", "repeated steps": "#cc4455", "starting": "#ccaa22", "validation": "#66bbdd",
    "saves and pauses": "#8866aa", "ending": "#77716a", "between attempts": "#a9b0b8",
}  # fmt: skip
TERM_COLORS = {
    "compute": "#4477aa", "recompute": "#8ab6dd", "tp": "#ee7733", "cp": "#ccaa22", "ep": "#cc4455",
    "pp_p2p": "#dd88aa", "pp_bubble": "#a9b0b8", "dp": "#8866aa", "optimizer": "#33a3a3", "overhead": "#77716a",
}  # fmt: skip


def render_report(reported: Sequence[tuple[Record, Figures]], *, command: str) -> str:
    """Return the HTML page of a report on runs.

    Args:
        reported: the records and figures of the runs.
        command: command line that generated the page, which the page shows.

    Raises:
        UserError: there are no or more than MAX_RUNS runs, or none has completed a step.
    """
    if not 0 < len(reported) <= MAX_RUNS:
        raise UserError(f"a page shows between 1 and {MAX_RUNS} runs, not {len(reported)}", "select fewer runs")
    runs = [run for run, _ in reported]
    names = [_name(run) for run in runs]
    lines = {field: [_line(run, field) for run in runs] for field in CURVES}
    shown_fields = [field for field in CURVES if any(line.xs for line in lines[field])]
    drawn: dict[str, figure] = {
        field: plot_curves(field, CURVES[field][0], lines[field], height=340 if field == "loss" else 220)
        for field in shown_fields
    }
    run_times = [(_short_name(run), figures.time_s) for run, figures in reported if figures.time_s]
    if run_times:
        drawn["time"] = plot_bars(
            "time", [name for name, _ in run_times], [*_stack([t for _, t in run_times], TIME_COLORS)]
        )
    planned = [(_short_name(run), figures) for run, figures in reported if figures.planned]
    if planned:
        drawn["terms"] = _terms(planned)
    if not drawn:
        raise UserError("no run has completed a step yet, so there is nothing to plot", "wait for the first step")
    data = {
        "names": names,
        "colors": [get_color(i) for i in range(len(runs))],
        "curves": {field: [{"x": line.xs, "y": line.ys} for line in lines[field]] for field in shown_fields},
        "dots": [{"x": line.dots_x, "y": line.dots_y} for line in lines["loss"]],
        "units": {field: CURVES[field][0] for field in shown_fields},
    }
    context = {
        "curves": [(field, *CURVES[field][1:]) for field in shown_fields],
        "facts": _facts(*reported[0]) if len(reported) == 1 else [],
        "titles": report_text.COLUMN_TITLES,
        "rows": report_text.build_comparison_rows(reported) if len(reported) > 1 else [],
        "time_names": [(name, paint) for name, paint in TIME_COLORS.items() if any(t.get(name) for _, t in run_times)],
        "goodput": GOODPUT.removeprefix("goodput: "),
        "term_names": [
            (name, paint) for name, paint in TERM_COLORS.items()
            if any(f.planned and f.planned.terms_s.get(name) for _, f in planned)
        ],
        "profiled": [(name, *row) for name, f in planned for row in _profiled_rows(f)],
        "stages": [stage for name, figures in planned for stage in _stages(name, figures)],
        "tables": [(name, _pairs(run, f)) for name, (run, f) in zip(names, reported, strict=True)],
        "next": [(name, f.next) for name, (_, f) in zip(names, reported, strict=True) if f.next],
        "timed": bool(run_times),
        "planned": bool(planned),
    }  # fmt: skip
    sections = []
    if shown_fields:
        sections.append(("curves", "Curves"))
    if run_times:
        sections.append(("time", "Time"))
    if planned:
        sections.append(("plan", "Plan"))
    sections.append(("all", "All figures"))
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs"
    lead = ", ".join(dict.fromkeys(_lead(run) for run in runs))
    return render(Page("report.html", title, lead, command, sections, ("report.js",), data, context), drawn)


def _name(run: Record) -> str:
    return f"{run.path.parent.name} {run.path.name}" if run.is_own else run.name


def _short_name(run: Record) -> str:
    """Return a name of at most 16 characters, for row labels on narrow screens."""
    name = run.path.name.rpartition("-")[2] if run.is_own else run.name
    return name if len(name) <= 16 else f"{name[:15]}…"


def _lead(run: Record) -> str:
    if run.rehearsal:
        return f"{run.source}, a rehearsal on CPUs, whose times are not representative of GPUs"
    return run.source


def _line(run: Record, field: str) -> Line:
    """Return the curve of a field of a run's steps, subsampled to at most `MAX_POINTS` points."""
    steps = report_text.select_steps(run, field)
    thinned_steps = steps[:: -(-len(steps) // MAX_POINTS)] if steps else []
    vals = [step for step in run.steps if step.val_loss is not None] if field == "loss" else []
    breaks = [(a.step + b.step) / 2 for a, b in pairwise(run.steps) if a.attempt != b.attempt]
    return Line(
        [step.step for step in thinned_steps],
        [getattr(step, field) for step in thinned_steps],
        [step.step for step in vals],
        [step.val_loss or 0.0 for step in vals],
        breaks if field == "loss" else (),
    )


def _stack(rows: Sequence[Mapping[str, float]], colors: Mapping[str, str]) -> list[Part]:
    """Return the parts of one bar per row ({name: seconds}), in the order of `colors` ({name: color})."""
    return [
        Part(row, name, values[name], paint)
        for row, values in enumerate(rows)
        for name, paint in colors.items()
        if values.get(name)
    ]


def _terms(planned: Sequence[tuple[str, Figures]]) -> figure:
    """Return a figure of the planned step time of each run by term, and of its measured median step time."""
    rows: list[str] = []
    values: list[dict[str, float]] = []
    for name, figures in planned:
        assert figures.planned is not None
        rows.append(f"{name}, planned" if len(planned) > 1 else "planned")
        values.append(dict(figures.planned.terms_s))
        if "p50" in figures.step_s:
            rows.append(f"{name}, measured" if len(planned) > 1 else "measured")
            values.append({"measured": figures.step_s["p50"]})
    return plot_bars("terms", rows, _stack(values, {**TERM_COLORS, "measured": "#35618f"}))


def _profiled_rows(figures: Figures) -> list[tuple[str, str, str]]:
    """Return rows (term, planned seconds, profiled seconds) of a run; [] without a profile."""
    rows = figures.planned.profiled if figures.planned else ()
    return [(name, f"{planned:.3f}", f"{own:.3f}") for name, planned, own in rows]


def _stages(name: str, figures: Figures) -> list[tuple[str, str, str, str]]:
    """Return rows (run, pipeline stage, planned GiB, measured GiB) of a run; [] without a plan."""
    if figures.planned is None:
        return []
    pairs = zip(figures.planned.stages_gib, figures.planned.measured_stages_gib, strict=True)
    return [
        (name, str(stage), f"{planned:.2f}", f"{own:.2f}" if own else "-") for stage, (planned, own) in enumerate(pairs)
    ]


def _facts(run: Record, figures: Figures) -> list[tuple[str, str, str]]:
    """Return (name, value, note) of each figure at the top of the page."""
    facts: list[tuple[str, str | None, str]] = [
        ("state", run.state or None, run.message[:80]),
        ("steps", f"{figures.steps:,}", f"{figures.attempts} attempts" if figures.attempts > 1 else ""),
        ("loss", _last_loss(figures), f"from {figures.loss_start:.4f}" if figures.loss_start else ""),
        ("validation loss", _format(figures.val_loss, ".4f"), f"at step {figures.val_step}"),
        ("step time", _format(figures.step_s.get("p50"), ".3g", " s"), f"p99 {figures.step_s.get('p99', 0):.3g} s"),
        ("throughput", None if run.rehearsal else _format(figures.rate, ",.0f"), "tokens/s/GPU"),
        ("MFU", _format(figures.mfu, ".1%"), f"HFU {figures.hfu:.1%}" if figures.hfu else ""),
        ("memory", _format(figures.peak_gib, ".2f", " GiB"), "peak, maximum of all ranks"),
        ("goodput", _format(figures.goodput, ".1%"), f"of {duration(figures.wall_s or 0.0)}"),
    ]
    return [(name, value, note) for name, value, note in facts if value]


def _last_loss(figures: Figures) -> str | None:
    if figures.losses.bad and figures.loss_end is None:
        return "not finite"
    return _format(figures.loss_end, ".4f")


def _format(value: float | None, spec: str, unit: str = "") -> str | None:
    return None if value is None else f"{value:{spec}}{unit}"


def _pairs(run: Record, figures: Figures) -> list[tuple[str, str]]:
    rows: list[tuple[str, Any]] = [*report_text.build_heading_rows(run, figures), *report_text.build_rows(run, figures)]
    return [*rows, ("folder" if run.is_own else "read from", str(run.path))]
