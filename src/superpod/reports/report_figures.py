"""The figures in a report: losses, speed, utilization, use of time, comparison with the plan, and a recommendation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median, quantiles
from typing import TYPE_CHECKING

from superpod.reports import published_runs, recommendation
from superpod.reports.published_runs import Published
from superpod.reports.runs.loss_summary import LossSummary
from superpod.reports.runs.run_record import PRODUCTIVE, Record, Span, Step, median_or_none, summarize_steps

if TYPE_CHECKING:
    from superpod.planner.planned_job import PlannedJob

MIN_DRIFT_STEPS = 8
"""Minimum number of timed steps to compute the drift of the step time."""
GOODPUT = "seconds of productive steps / seconds from the start of the first attempt to the end of the last"
TIME_CATEGORIES = (
    *(PRODUCTIVE, "repeated steps", "starting", "validation", "saves and pauses", "ending"),
    "between attempts",
)
"""Categories of the wall-clock time of a run, the keys of `Figures.time_s`."""
ROUNDING = 1.02
"""Maximum ratio of the parts of an attempt to its duration. Times in logs are rounded, so it may exceed 1."""
MAX_PROFILE_BYTES = 64 * 2**20
"""Maximum bytes of a profile that a report reads; `recipes profile show` reads larger ones."""
MAX_SLOW_RANKS = 3
MIN_SCORE = 0.95
"""Relative speed below which a rank is slow; 1 = as fast as the fastest rank."""


@dataclass(frozen=True)
class Planned:
    """The planner's prediction for a run, with measurements; in seconds, GiB and tokens/s/GPU."""

    step_s: float
    step_time: str
    """the step time with its 80 % interval, such as `14.4 s (13.1-16.2)`"""
    extrapolation: str
    rate: float
    mfu: float
    terms_s: Mapping[str, float]
    allocated_gib: float | None
    reserved_gib: float | None
    stages_gib: Sequence[float]
    measured_stages_gib: Sequence[float | None]
    """highest peak of all ranks per pipeline stage, from the heartbeats"""
    bound: str
    profiled: Sequence[tuple[str, float, float]]
    """terms of a profiled run: name, planned seconds and measured seconds per step"""


@dataclass(frozen=True)
class Figures:
    """The figures of a run: losses in nats per token, times in seconds; None or empty for unknown values."""

    steps: int
    attempts: int
    loss_start: float | None
    loss_end: float | None
    """None if the last loss is non-finite"""
    losses: LossSummary
    val_loss: float | None
    val_step: int | None
    grad_norm_end: float | None
    grad_norm_most: float | None
    lr_most: float | None
    lr_end: float | None
    tokens: float | None
    rate: float | None
    """tokens/s/GPU, median"""
    step_s: Mapping[str, float]
    """p50, p90 and p99 of the step time, without the first step of each attempt"""
    drift: float | None
    """median step time of the last quarter divided by that of the first, minus 1"""
    tflops: float | None
    """model TFLOP/s per GPU"""
    mfu: float | None
    hfu: float | None
    flops_formula: str
    slow_ranks: tuple[str, ...]
    peak_gib: float | None
    saves: int
    save_s: float | None
    """the longest save"""
    wall_s: float | None
    time_s: Mapping[str, float]
    """wall-clock time by category (PARTS); adds up to `wall_s`"""
    goodput: float | None
    planned: Planned | None
    unplanned: str
    published: Published | None
    next: str


def compute_figures(run: Record) -> Figures:
    """Return the numbers in the report of a run, and the recommended next step."""
    seconds = [step.seconds for step in run.steady if step.seconds]
    p50 = median_or_none(seconds)
    mfu, hfu, tflops, formula = _compute_utilization(run, p50)
    time_s = split_wall_time(run)
    wall_s = sum(time_s.values()) if time_s else None
    longest_saves = [span.longest_save_s for span in run.spans if span.longest_save_s]
    summary = summarize_steps(run.steps)
    figures = Figures(
        steps=summary.steps,
        attempts=len(run.spans),
        loss_start=summary.losses.start,
        loss_end=summary.losses.end,
        losses=summary.losses,
        val_loss=summary.val_loss,
        val_step=summary.val_step,
        grad_norm_end=_find_first_value(reversed(run.steps), "grad_norm"),
        grad_norm_most=max((step.grad_norm for step in run.steps if step.grad_norm is not None), default=None),
        lr_most=max((step.lr for step in run.steps if step.lr is not None), default=None),
        lr_end=_find_first_value(reversed(run.steps), "lr"),
        tokens=summary.tokens,
        rate=summary.rate,
        step_s=compute_percentiles(seconds),
        drift=_compute_drift(seconds),
        tflops=tflops,
        mfu=mfu,
        hfu=hfu,
        flops_formula=formula,
        slow_ranks=_describe_slow_ranks(run),
        peak_gib=run.peak_gib,
        saves=run.saved,
        save_s=max((*run.saves_s, *longest_saves), default=0.0) or None,
        wall_s=wall_s,
        time_s=time_s,
        goodput=time_s[PRODUCTIVE] / wall_s if wall_s else None,
        planned=_compare_with_plan(run),
        unplanned=run.unplanned,
        published=published_runs.find_nearest(run.job) if run.job else None,
        next="",
    )
    return replace(figures, next=recommendation.recommend(run, figures))


def compute_percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return p50, p90 and p99 of step times, interpolated like `numpy.percentile`; {} for an empty sequence."""
    if not seconds:
        return {}
    if len(seconds) == 1:
        return dict.fromkeys(("p50", "p90", "p99"), seconds[0])
    cuts = quantiles(seconds, n=100, method="inclusive")
    return {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}


def split_wall_time(run: Record) -> dict[str, float]:
    """Return the seconds of a run in each of `TIME_CATEGORIES`; {} if the times of the run are unknown.

    They add up to the time from the start of the first attempt to the end of the last. Time between two steps of an
    attempt, except validation, counts as saves and pauses.
    """
    spans = [span for span in run.spans if span.began is not None and span.ended is not None]
    if not spans or len(spans) < len(run.spans) or not any(step.t for step in run.steps):
        return {}
    time_s: dict[str, float] = dict.fromkeys(TIME_CATEGORIES, 0.0)
    for span in spans:
        parts = _split_attempt(run, span)
        if sum(parts.values()) > ROUNDING * max(0.0, (span.ended or 0.0) - (span.began or 0.0)):
            return {}  # steps that take longer than their attempt: the clock was set back
        for name, seconds in parts.items():
            time_s[name] += seconds
    for before, after in pairwise(spans):
        time_s["between attempts"] += max(0.0, (after.began or 0.0) - (before.ended or 0.0))
    return time_s


def _split_attempt(run: Record, span: Span) -> dict[str, float]:
    """Return the seconds of one attempt in each category."""
    kept_steps = [step for step in run.steps if step.attempt == span.name and step.t is not None and step.seconds]
    lost_steps = [step for step in run.repeated if step.attempt == span.name and step.t is not None and step.seconds]
    all_steps = sorted((*kept_steps, *lost_steps), key=lambda step: step.step)
    began, ended = span.began or 0.0, span.ended or 0.0
    if not all_steps:
        return {"starting": max(0.0, ended - began)}

    first, last = all_steps[0], all_steps[-1]
    productive_s = sum((step.seconds or 0.0) * step.count for step in kept_steps)
    repeated_s = sum((step.seconds or 0.0) * step.count for step in lost_steps)
    starting = max(0.0, (first.t or 0.0) - (first.seconds or 0.0) * first.count - began)
    validation = sum(max(0.0, step.validated - (step.t or 0.0)) for step in all_steps if step.validated)
    training_end = last.validated or last.t or ended
    ending = max(0.0, ended - training_end)
    other_s = max(0.0, ended - began - productive_s - repeated_s - starting - validation - ending)
    return {
        PRODUCTIVE: productive_s, "repeated steps": repeated_s, "starting": starting, "validation": validation,
        "saves and pauses": other_s, "ending": ending,
    }  # fmt: skip


def _compute_utilization(run: Record, p50: float | None) -> tuple[float | None, float | None, float | None, str]:
    """Return MFU, HFU, model TFLOP/s per GPU (None if unknown), and the formula as text."""
    from superpod.planner import hardware
    from superpod.planner.timing import steptime

    reported_tflops = median_or_none([step.tflops for step in run.steady if step.tflops])
    if run.job is None and reported_tflops and run.gpu:
        peak_tflops = hardware.node(run.gpu).gpu.tflops("bf16")
        reference = f"{peak_tflops:,.0f} TFLOP/s, the dense bf16 peak of the {run.gpu}; its precision is not in the log"
        formula = f"MFU: TFLOP/s per GPU reported by the run / {reference}"
        return reported_tflops / peak_tflops, None, reported_tflops, formula
    if run.job is None:
        return None, None, reported_tflops, "as reported by the run" if reported_tflops else ""

    peak_tflops = run.job.node.gpu.tflops(run.job.precision)
    reference = f"{peak_tflops:,.0f} TFLOP/s, the dense {run.job.precision} peak of the {run.job.node.gpu.name}"
    if reported_tflops:
        ratio = float(steptime.hfu(run.job, 1.0)) / float(steptime.mfu(run.job, 1.0))
        mfu = reported_tflops / peak_tflops
        return mfu, mfu * ratio, reported_tflops, f"MFU: TFLOP/s per GPU reported by the run / {reference}"
    if p50 is None:
        return None, None, None, ""
    mfu, hfu = float(steptime.mfu(run.job, p50)), float(steptime.hfu(run.job, p50))
    flops = "model FLOPs of a step (causal attention, no recomputation) / (median step time x GPUs x peak)"
    return mfu, hfu, mfu * peak_tflops, f"MFU: {flops}; peak: {reference}"


def _compare_with_plan(run: Record) -> Planned | None:
    """Return the prediction for a run with its measurements; None if the run cannot be planned."""
    from superpod.planner import columns as table
    from superpod.planner import explain, memory, predict

    job = run.job
    if job is None:
        return None
    prediction = predict.one(job)
    if prediction.step_time_s is None:
        return None
    owners = memory.by_owner(job, table.from_job(job))
    stages = [sum(float(part[rank]) for part in owners.values()) / 2**30 for rank in range(job.layout.pp)]
    return Planned(
        step_s=prediction.step_time_s,
        step_time=prediction.step_time,
        extrapolation=prediction.extrapolation,
        rate=prediction.tokens_per_s_per_gpu or 0.0,
        mfu=prediction.mfu or 0.0,
        terms_s=dict(prediction.terms_s),
        allocated_gib=prediction.allocated_gib_max,
        reserved_gib=prediction.reserved_gib_max,
        stages_gib=stages,
        measured_stages_gib=_compute_stage_peaks(run, job),
        bound=explain.bound(prediction),
        profiled=_read_profiled_terms(run),
    )


def _read_profiled_terms(run: Record) -> Sequence[tuple[str, float, float]]:
    """Return (term, planned seconds, measured seconds) from a profile in the run folder; () without a profile."""
    from superpod.errors import UserError
    from superpod.profiles import profile_files, profile_summary
    from superpod.runtime.runs.run_folder import RunFolder

    folder = RunFolder(run.path)
    if not run.is_own or not profile_files.profiled_ranks(folder):
        return ()
    try:
        path = profile_files.find_profile(folder)
        if path.stat().st_size > MAX_PROFILE_BYTES:
            return ()
        planned = profile_summary.read_run_plan(folder)
        rows = profile_summary.summarize(path, profile_files.read(path), planned).rows
    except (UserError, OSError):
        return ()  # `recipes profile show` reports the error
    return [(row.name, row.planned_s, row.measured_s) for row in rows]


def _compute_stage_peaks(run: Record, job: PlannedJob) -> list[float | None]:
    """Return the highest memory peak of the ranks of each pipeline stage in GiB; None if unknown."""
    # Megatron numbers the ranks stage by stage.
    peaks: list[float | None] = [None] * job.layout.pp
    for rank in run.ranks:
        if rank.allocated_gib and rank.rank < job.gpus:
            stage = rank.rank * job.layout.pp // job.gpus
            peaks[stage] = max(peaks[stage] or 0.0, rank.allocated_gib)
    return peaks


def _describe_slow_ranks(run: Record) -> tuple[str, ...]:
    """Describe up to `MAX_SLOW_RANKS` slow ranks, by their scores or, without scores, by their last steps."""
    scored_ranks = sorted((rank for rank in run.ranks if rank.score is not None), key=lambda rank: rank.score or 0.0)
    if scored_ranks:
        slow_ranks = [rank for rank in scored_ranks if (rank.score or 0.0) < MIN_SCORE][:MAX_SLOW_RANKS]
        return tuple(f"rank {r.rank} on {r.host}: {r.score:.0%} of the fastest rank's speed" for r in slow_ranks)
    newest_step = max((rank.step for rank in run.ranks if rank.step is not None), default=0)
    late_ranks = sorted(
        (rank.step, rank.rank, rank) for rank in run.ranks if rank.step is not None and rank.step < newest_step
    )
    return tuple(
        f"rank {r.rank} on {r.host}: at step {step} of {newest_step} ({r.phase})"
        for step, _, r in late_ranks[:MAX_SLOW_RANKS]
    )


def _compute_drift(seconds: Sequence[float]) -> float | None:
    """Return the median of the last quarter divided by that of the first, minus 1; None for few steps."""
    if len(seconds) < MIN_DRIFT_STEPS:
        return None
    quarter = len(seconds) // 4
    return median(seconds[-quarter:]) / median(seconds[:quarter]) - 1


def _find_first_value(steps: Iterable[Step], name: str) -> float | None:
    """Return the first value of the field `name` that is not None."""
    values = (getattr(step, name) for step in steps)
    return next((value for value in values if value is not None), None)
