"""Steps, attempts and ranks of a run for reports, from any source. `read_run` reads run folders of this project."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from superpod.common.json_files import JsonObject, number_or_none, read_bytes, read_lines, tail_text
from superpod.errors import UserError, counted
from superpod.reports.runs.loss_summary import LossSummary, summarize_losses
from superpod.runtime.heartbeat import heartbeat_pages
from superpod.runtime.runs.run_facts import METRICS, read_metrics
from superpod.runtime.runs.run_folder import Attempt, RunFolder

if TYPE_CHECKING:
    from superpod.planner.planned_job import PlannedJob

OWN = "run folder"
"""`Record.source` of a run of this project."""
PRODUCTIVE = "steps that count"
"""Key of `Figures.time_s` for steps that no later attempt repeated. The text is part of the JSON format."""
SCORE = re.compile(r"Rank=(\d+) Node=(\S+) Score=([\d.]+)")
"""Relative speed of a GPU, from nvidia-resiliency-ext's straggler detection (straggler_det_callback.py)."""


@dataclass(frozen=True)
class Step:
    """A training step as reported by its run: loss in nats per token, time in seconds; None for unknown values."""

    step: int
    """number of the optimizer step, from 1"""
    attempt: str = ""
    t: float | None = None
    """Unix time of the report"""
    loss: float | None = None
    bad_loss: bool = False
    """whether the reported loss is non-finite: nan, inf, or null"""
    val_loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    seconds: float | None = None
    tokens: float | None = None
    """number of tokens since the start of the run"""
    rate: float | None = None
    """tokens/s/GPU"""
    tflops: float | None = None
    """model TFLOP/s per GPU, as reported by the run"""
    validated: float | None = None
    """Unix time at which the validation after this step ended"""
    count: int = 1
    """number of steps that the report covers: a log may have one line with the mean of ten steps"""


@dataclass(frozen=True)
class Span:
    """Start and end of an attempt (Unix times), its state, and its longest save in seconds."""

    name: str
    began: float | None = None
    ended: float | None = None
    state: str = ""
    longest_save_s: float | None = None


@dataclass(frozen=True)
class Rank:
    """The last known step and phase of a rank, and its relative speed; None for unknown values."""

    rank: int
    host: str = ""
    step: int | None = None
    phase: str = ""
    allocated_gib: float | None = None
    score: float | None = None
    """1 = as fast as the fastest rank"""


@dataclass(frozen=True)
class Record:
    """The data of a run, finished or not."""

    name: str
    path: Path
    source: str
    """OWN, or the kind of file from which it was read"""
    steps: tuple[Step, ...] = ()
    """one report per step, from the last attempt that made it"""
    repeated: tuple[Step, ...] = ()
    """reports from earlier attempts for steps that a later attempt repeated"""
    spans: tuple[Span, ...] = ()
    ranks: tuple[Rank, ...] = ()
    gpu: str = ""
    """GPU type, if the user specified it for an external run"""
    gpus: int | None = None
    seq: int | None = None
    job: PlannedJob | None = None
    unplanned: str = ""
    """reason if there is no `job`"""
    rehearsal: bool = False
    state: str = ""
    message: str = ""
    entropy: float | None = None
    """unigram entropy of the data, nats per token"""
    peak_gib: float | None = None
    saves_s: tuple[float, ...] = ()
    """durations of saves, as far as known"""
    saved: int = 0
    """number of complete checkpoints"""
    waiting: float | None = None
    """share of a step spent waiting for data"""
    left_out: str = ""
    """text on lines of the source that were not used"""
    remark: str = ""
    """problem with the losses, if the source contains more losses than `steps`"""

    @property
    def is_own(self) -> bool:
        """Whether the data come from a run folder of this project."""
        return self.source == OWN

    @property
    def steady(self) -> list[Step]:
        """The steps without warm-up; see `steady_steps`."""
        return steady_steps(self.steps)


def read_run(run: RunFolder) -> Record:
    """Return the data of a run folder."""
    lines, attempts = read_metrics(run.path), run.attempts
    steps, repeated = read_steps(lines)
    status, rehearsal = run.status(), run.facts.get("rehearsal") is True
    job, unplanned = _read_planned_job(run)
    heartbeats = attempts[-1].heartbeats() if attempts else {}
    scores = _read_scores(attempts[-1]) if heartbeats else {}
    saved_lines = [line for line in read_lines(run.path / "saved.jsonl") if "step" in line and "lost" not in line]
    return Record(
        name=f"{run.recipe} {run.path.name}",
        path=run.path,
        source=OWN,
        steps=steps,
        repeated=repeated,
        spans=tuple(read_span(attempt) for attempt in attempts),
        ranks=tuple(_parse_rank(rank, heartbeats[rank], scores) for rank in sorted(heartbeats)),
        gpus=_count_gpus(run, heartbeats),
        seq=job.seq if job else None,
        job=None if rehearsal else job,
        unplanned="it ran on CPUs" if rehearsal else unplanned,
        rehearsal=rehearsal,
        state=status.state,
        message=status.message,
        entropy=number_or_none(run.facts.get("unigram_entropy_nats")),
        peak_gib=compute_peak_gib(lines, attempts),
        saved=len(saved_lines),
        left_out=_describe_left_out(run.path / METRICS, len(lines)),
    )


def merge_reports(reports: Iterable[Step]) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Return the last report of each step, and the reports that a later attempt repeated."""
    kept: dict[int, Step] = {}
    repeated_steps = []
    for report in reports:
        previous_report = kept.get(report.step)
        if previous_report is not None and previous_report.attempt != report.attempt:
            repeated_steps.append(previous_report)
        kept[report.step] = report
    return tuple(kept[step] for step in sorted(kept)), tuple(repeated_steps)


def compute_interval(steps: Sequence[Step]) -> int:
    """Return the median number of steps from one report to the next, 1 if unknown."""
    gaps = [after.step - before.step for before, after in pairwise(steps) if after.step > before.step]
    return round(median(gaps)) if gaps else 1


def read_steps(lines: Iterable[JsonObject]) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Return the steps in lines of metrics.jsonl, and those that a later attempt repeated.

    A step with validation has a second line, written at the end of the validation.
    """
    reports: dict[tuple[str, int], Step] = {}
    for line in lines:
        key = str(line.get("attempt", "")), line["step"]
        step, first = _parse_step(line), reports.get(key)
        if first is not None and step.val_loss is not None:
            step = replace(step, t=first.t, validated=step.t)
        reports[key] = step
    return merge_reports(reports.values())


def _parse_step(line: JsonObject) -> Step:
    names = {name: name for name in ("t", "loss", "val_loss", "lr", "grad_norm", "tokens")}
    names |= {"seconds": "step_time_s", "rate": "tokens_per_s_per_gpu"}
    bad = "loss" in line and line["loss"] is None
    step = Step(line["step"], str(line.get("attempt", "")), bad_loss=bad)
    return replace(step, **{field: number_or_none(line.get(name)) for field, name in names.items()})


def steady_steps(steps: Iterable[Step]) -> list[Step]:
    """Return the timed steps without the first of each attempt, which includes warm-up; all if there are no others."""
    timed_steps = [step for step in steps if step.seconds]
    warm_steps = [step for before, step in pairwise(timed_steps) if before.attempt == step.attempt]
    return warm_steps or timed_steps


def summarize_step_losses(steps: Iterable[Step]) -> LossSummary:
    """Return the summary of the losses of steps in order."""
    return summarize_losses((step.step, step.loss) for step in steps if step.bad_loss or step.loss is not None)


@dataclass(frozen=True)
class StepSummary:
    """Summary of a run's steps; None for unknown values."""

    steps: int
    """number of the last optimizer step"""
    losses: LossSummary
    val_loss: float | None
    """the latest validation loss"""
    val_step: int | None
    tokens: float | None
    rate: float | None
    """tokens/s/GPU, median over all steps except the first of each attempt"""


def summarize_steps(steps: Sequence[Step]) -> StepSummary:
    """Return the summary of steps, which must be in order."""
    last_validated = next((step for step in reversed(steps) if step.val_loss is not None), None)
    return StepSummary(
        steps=steps[-1].step if steps else 0,
        losses=summarize_step_losses(steps),
        val_loss=last_validated.val_loss if last_validated else None,
        val_step=last_validated.step if last_validated else None,
        tokens=next((step.tokens for step in reversed(steps) if step.tokens is not None), None),
        rate=median_or_none([step.rate for step in steady_steps(steps) if step.rate]),
    )


def compute_peak_gib(lines: Iterable[JsonObject], attempts: Iterable[Attempt]) -> float | None:
    """Return the peak of allocated memory over all ranks and attempts, in GiB."""
    heartbeats = [beat for attempt in attempts for beat in attempt.heartbeats().values()]
    peaks = [number_or_none(line.get("allocated_gib")) for line in (*lines, *heartbeats)]
    return max((peak for peak in peaks if peak), default=None)


def median_or_none(values: Sequence[float]) -> float | None:
    """Return the median; None for an empty sequence."""
    return median(values) if values else None


def _describe_left_out(metrics_file: Path, read: int) -> str:
    try:
        rows = sum(1 for row in read_bytes(metrics_file).split(b"\n") if row.strip())
    except OSError:
        return ""
    missing_rows = rows - read
    if missing_rows <= 0:
        return ""
    return f"{counted(missing_rows, 'row')} of metrics.jsonl: truncated, or not a training step"


def read_span(attempt: Attempt) -> Span:
    """Return start and end of an attempt; without a recorded end, that of its last heartbeat."""
    result = attempt.result
    end_time = number_or_none(result.get("ended")) or number_or_none(attempt.heartbeat().get("t"))
    save = heartbeat_pages.longest_save_s(attempt.path / "heartbeat") or None
    return Span(attempt.name, number_or_none(result.get("started")), end_time, str(result.get("state", "")), save)


def _parse_rank(rank: int, beat: Mapping[str, object], scores: Mapping[int, float]) -> Rank:
    step, gib = beat.get("step"), number_or_none(beat.get("allocated_gib"))
    known_step = step if isinstance(step, int) else None
    return Rank(rank, str(beat.get("host", "")), known_step, str(beat.get("phase", "")), gib, scores.get(rank))


def _read_scores(attempt: Attempt) -> dict[int, float]:
    """Return the latest straggler detection score of each rank in the first log of an attempt; {} if there is none."""
    scores: dict[int, float] = {}
    for log in attempt.logs[:1]:  # of rank 0 or the first node
        try:
            scores |= {int(match[1]): float(match[3]) for match in SCORE.finditer(tail_text(log, 1 << 20))}
        except (OSError, ValueError):
            continue
    return scores


def _count_gpus(run: RunFolder, heartbeats: Mapping[int, JsonObject]) -> int | None:
    nodes, per_node = run.facts.get("nodes"), run.facts.get("gpus_per_node")
    if isinstance(nodes, int) and isinstance(per_node, int):
        return nodes * per_node
    return len(heartbeats) or None


def _read_planned_job(run: RunFolder) -> tuple[PlannedJob | None, str]:
    """Return the planned job, or None and the reason."""
    from superpod.reports.runs.run_plan import planned_job

    try:
        return planned_job(run), ""
    except UserError as error:
        return None, str(error)
