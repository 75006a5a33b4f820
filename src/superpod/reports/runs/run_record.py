"""A run as a report reads it, whoever made it: steps, attempts, ranks. `record` reads this project's run folders."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from superpod.common.files import JsonObject, number_or_none, read_bytes, read_lines, tail_text
from superpod.errors import UserError, counted
from superpod.reports.runs import loss_summary
from superpod.reports.runs.loss_summary import LossSummary
from superpod.runtime.heartbeat import heartbeat_pages
from superpod.runtime.runs.run_facts import METRICS, read_metrics
from superpod.runtime.runs.run_folder import Attempt, RunFolder

if TYPE_CHECKING:
    from superpod.planner.planned_job import PlannedJob

OWN = "run folder"
"""The source of a run that this project made."""
SCORE = re.compile(r"Rank=(\d+) Node=(\S+) Score=([\d.]+)")
"""A GPU's speed against the others', of nvidia-resiliency-ext's straggler detection (straggler_det_callback.py)."""


@dataclass(frozen=True)
class Step:
    """A step as its run reported it; None for what is not known. Losses in nats per token, times in seconds."""

    step: int
    """optimizer steps done, from 1"""
    attempt: str = ""
    t: float | None = None
    """Unix time of the report"""
    loss: float | None = None
    bad_loss: bool = False
    """it has reported a loss, and that is no number: nan, inf, or null"""
    val_loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    seconds: float | None = None
    tokens: float | None = None
    """of the run so far"""
    rate: float | None = None
    """tokens/s/GPU"""
    tflops: float | None = None
    """model TFLOP/s of a GPU, as the run itself counted them"""
    validated: float | None = None
    """Unix time at which the validation after it was over"""
    count: int = 1
    """steps that the report stands for: a log may have one line for ten of them, with their mean"""


@dataclass(frozen=True)
class Span:
    """An attempt: from when to when (Unix times), and how it ended."""

    name: str
    began: float | None = None
    ended: float | None = None
    state: str = ""
    longest_save_s: float | None = None


@dataclass(frozen=True)
class Rank:
    """The last place of a rank, or its speed against the others'; None for what is not known."""

    rank: int
    host: str = ""
    step: int | None = None
    phase: str = ""
    allocated_gib: float | None = None
    score: float | None = None
    """1 = as fast as the fastest"""


@dataclass(frozen=True)
class Record:
    """A run, finished or not."""

    name: str
    path: Path
    source: str
    """OWN, or what else it was read from"""
    steps: tuple[Step, ...] = ()
    """one a step, as the last attempt made it"""
    repeated: tuple[Step, ...] = ()
    """what earlier attempts reported of steps that a later one made again"""
    spans: tuple[Span, ...] = ()
    ranks: tuple[Rank, ...] = ()
    gpu: str = ""
    """its name in the planner, where there is no `job` but the user has said it"""
    gpus: int | None = None
    seq: int | None = None
    job: PlannedJob | None = None
    unplanned: str = ""
    """why there is no `job`"""
    rehearsal: bool = False
    state: str = ""
    message: str = ""
    entropy: float | None = None
    """of the data's unigrams, nats per token"""
    peak_gib: float | None = None
    saves_s: tuple[float, ...] = ()
    """how long saves took, where each is known"""
    saved: int = 0
    """checkpoints that were completed"""
    waiting: float | None = None
    """share of a step spent in waiting for data"""
    left_out: str = ""
    """what of its source was not taken, in words, with the number of lines"""
    remark: str = ""
    """what its losses tell, in words, where the source has more than its steps: a loss that is no number"""

    @property
    def is_own(self) -> bool:
        """Whether this project made it."""
        return self.source == OWN

    @property
    def steady(self) -> list[Step]:
        """As `steady`."""
        return steady(self.steps)


def read_run(run: RunFolder) -> Record:
    """What a run folder holds of a run."""
    lines, attempts = read_metrics(run.path), run.attempts
    steps, repeated = read_steps(lines)
    status, rehearsal = run.status(), run.facts.get("rehearsal") is True
    job, unplanned = _job(run)
    beats = attempts[-1].heartbeats() if attempts else {}
    ranks = tuple(_rank(rank, beats[rank], _scores(attempts[-1])) for rank in sorted(beats))
    saved = [line for line in read_lines(run.path / "saved.jsonl") if "step" in line and "lost" not in line]
    return Record(
        name=f"{run.recipe} {run.path.name}",
        path=run.path,
        source=OWN,
        steps=steps,
        repeated=repeated,
        spans=tuple(span(attempt) for attempt in attempts),
        ranks=ranks,
        gpus=_gpus(run, beats),
        seq=job.seq if job else None,
        job=None if rehearsal else job,
        unplanned="it ran on CPUs" if rehearsal else unplanned,
        rehearsal=rehearsal,
        state=status.state,
        message=status.message,
        entropy=number_or_none(run.facts.get("unigram_entropy_nats")),
        peak_gib=peak_gib(lines, attempts),
        saved=len(saved),
        left_out=_left_out(run.path / METRICS, len(lines)),
    )


def merged(reports: Iterable[Step]) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Of reports in the order in which they came: one a step, the last; and those that others have replaced."""
    kept: dict[int, Step] = {}
    repeated = []
    for report in reports:
        before = kept.get(report.step)
        if before is not None and before.attempt != report.attempt:
            repeated.append(before)
        kept[report.step] = report
    return tuple(kept[step] for step in sorted(kept)), tuple(repeated)


def interval(steps: Sequence[Step]) -> int:
    """Steps from one report to the next."""
    gaps = [after.step - before.step for before, after in pairwise(steps) if after.step > before.step]
    return round(median(gaps)) if gaps else 1


def read_steps(lines: Iterable[JsonObject]) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The steps of metrics.jsonl, and those that a later attempt repeated, as `merged` has them.

    A validated step has a second line, whose time is that of the validation's end.
    """
    reports: dict[tuple[str, int], Step] = {}
    for line in lines:
        key = str(line.get("attempt", "")), line["step"]
        step, first = _step(line), reports.get(key)
        if first is not None and step.val_loss is not None:
            step = replace(step, t=first.t, validated=step.t)
        reports[key] = step
    return merged(reports.values())


def _step(line: JsonObject) -> Step:
    names = {name: name for name in ("t", "loss", "val_loss", "lr", "grad_norm", "tokens")}
    names |= {"seconds": "step_time_s", "rate": "tokens_per_s_per_gpu"}
    bad = "loss" in line and line["loss"] is None
    step = Step(line["step"], str(line.get("attempt", "")), bad_loss=bad)
    return replace(step, **{field: number_or_none(line.get(name)) for field, name in names.items()})


def steady(steps: Iterable[Step]) -> list[Step]:
    """Steps with a time, without the first one of each attempt, which compiles; all where there are no others."""
    timed = [step for step in steps if step.seconds]
    warm = [step for before, step in pairwise(timed) if before.attempt == step.attempt]
    return warm or timed


def summarize_step_losses(steps: Iterable[Step]) -> LossSummary:
    """Where the losses of these steps begin and end."""
    return loss_summary.summarize_losses(
        (step.step, step.loss) for step in steps if step.bad_loss or step.loss is not None
    )


@dataclass(frozen=True)
class StepSummary:
    """The steps of a run in figures; None for what is not known."""

    steps: int
    """optimizer steps done"""
    losses: LossSummary
    val_loss: float | None
    """the newest"""
    val_step: int | None
    tokens: float | None
    rate: float | None
    """tokens/s/GPU, the median without the first step of each attempt"""


def summarize(steps: Sequence[Step]) -> StepSummary:
    """The figures of steps in their order."""
    validated = next((step for step in reversed(steps) if step.val_loss is not None), None)
    return StepSummary(
        steps=steps[-1].step if steps else 0,
        losses=summarize_step_losses(steps),
        val_loss=validated.val_loss if validated else None,
        val_step=validated.step if validated else None,
        tokens=next((step.tokens for step in reversed(steps) if step.tokens is not None), None),
        rate=median_or_none([step.rate for step in steady(steps) if step.rate]),
    )


def peak_gib(lines: Iterable[JsonObject], attempts: Iterable[Attempt]) -> float | None:
    """The largest peak of allocated memory over all ranks and attempts, GiB."""
    beats = [beat for attempt in attempts for beat in attempt.heartbeats().values()]
    peaks = [number_or_none(line.get("allocated_gib")) for line in (*lines, *beats)]
    return max((peak for peak in peaks if peak), default=None)


def median_or_none(values: Sequence[float]) -> float | None:
    """The median; None of nothing."""
    return median(values) if values else None


def _left_out(metrics_file: Path, taken: int) -> str:
    try:
        rows = sum(1 for row in read_bytes(metrics_file).split(b"\n") if row.strip())
    except OSError:
        return ""
    missing = rows - taken
    return f"{counted(missing, 'row')} of metrics.jsonl: torn, or no step of a training" if missing > 0 else ""


def span(attempt: Attempt) -> Span:
    """An attempt; it ended with its last sign of life where it has recorded no end."""
    result = attempt.result
    ended = number_or_none(result.get("ended")) or number_or_none(attempt.heartbeat().get("t"))
    save = heartbeat_pages.longest_save_s(attempt.path / "heartbeat") or None
    return Span(attempt.name, number_or_none(result.get("started")), ended, str(result.get("state", "")), save)


def _rank(rank: int, beat: Mapping[str, object], scores: Mapping[int, float]) -> Rank:
    step, gib = beat.get("step"), number_or_none(beat.get("allocated_gib"))
    known = step if isinstance(step, int) else None
    return Rank(rank, str(beat.get("host", "")), known, str(beat.get("phase", "")), gib, scores.get(rank))


def _scores(attempt: Attempt) -> dict[int, float]:
    """The newest scores in an attempt's logs, where `with=stragglers` wrote some."""
    scores: dict[int, float] = {}
    for log in attempt.logs[:1]:  # rank 0's, or the first node's
        try:
            scores |= {int(match[1]): float(match[3]) for match in SCORE.finditer(tail_text(log, 1 << 20))}
        except (OSError, ValueError):
            continue
    return scores


def _gpus(run: RunFolder, beats: Mapping[int, JsonObject]) -> int | None:
    nodes, per_node = run.facts.get("nodes"), run.facts.get("gpus_per_node")
    if isinstance(nodes, int) and isinstance(per_node, int):
        return nodes * per_node
    return len(beats) or None


def _job(run: RunFolder) -> tuple[PlannedJob | None, str]:
    from superpod.reports.runs.run_plan import planned_job

    try:
        return planned_job(run), ""
    except UserError as missing:
        return None, str(missing)
