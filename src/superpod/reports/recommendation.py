"""The recommendation in a report: the problem of a run that costs the most time, and how to reduce it."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from superpod.errors import counted
from superpod.reports.runs.run_record import PRODUCTIVE
from superpod.runtime.runs.run_state import State

if TYPE_CHECKING:
    from superpod.reports.report_figures import Figures
    from superpod.reports.runs.run_record import Record

TOLERANCE = 0.1
"""Deviation from the plan, or lost share of the time, above which a recommendation is made."""
SHORT_S = 1800.0
"""Maximum duration of a short run, in which startup always takes a large share of the time."""
MAX_WAITING_SHARE = 0.1
"""Share of a step spent waiting for data, above which a change is recommended."""

LOSSES = {
    "repeated steps": ("save more often", "log.ckpt.every_n_train_steps"),
    "starting": ("use longer attempts", "docs/slurm.md lists what a start consists of"),
    "saves and pauses": ("save less often, or asynchronously", "log.ckpt.every_n_train_steps"),
    "validation": ("validate less", "trainer.val_check_interval, trainer.limit_val_batches"),
    "between attempts": ("the job was queued or waited for a missing node", "`recipes history` shows the attempts"),
    "ending": ("mostly the last save", "docs/checkpoints.md"),
}
"""Category of lost time -> advice, and the setting or page for a run of this project."""


@dataclass(frozen=True)
class Recommendation:
    """A problem of a run, its cost in seconds, and advice."""

    cost_s: float
    problem: str
    advice: str


def recommend(run: Record, figures: Figures) -> str:
    """Return the most important recommendation for a run as one line; "" if there is none."""
    path = shlex.quote(str(run.path))
    if run.state in (State.FAILED, State.STALLED):
        return f"`recipes why {path}` names the cause of the failure"

    anomaly = _describe_loss_anomaly(run)
    if anomaly:
        return f"{anomaly}: `recipes why {path}` shows the log lines"

    # In both cases the GPUs are idle or slow, so the one that takes more seconds costs more GPU hours.
    candidates = [one for one in (_find_lost_time(run, figures), _find_slow_steps(run, figures)) if one is not None]
    if candidates:
        most_costly = max(candidates, key=lambda one: one.cost_s)
        return _format_with_gpu_hours(most_costly, None if run.rehearsal else run.gpus)
    if run.rehearsal:
        return _suggest_check(run)
    return _suggest_faster_layout(run, figures)


def _format_with_gpu_hours(recommendation: Recommendation, gpus: int | None) -> str:
    """Return a recommendation as text, with its cost in GPU hours if it is at least one."""
    hours = recommendation.cost_s * (gpus or 0) / 3600
    if hours < 1:
        return f"{recommendation.problem}: {recommendation.advice}"
    return f"{recommendation.problem}, about {counted(round(hours), 'GPU hour')}: {recommendation.advice}"


def _find_lost_time(run: Record, figures: Figures) -> Recommendation | None:
    """Return a recommendation for the largest category of lost time; None for short runs and high goodput."""
    if figures.goodput is None or figures.goodput >= 1 - TOLERANCE:
        return None
    if run.rehearsal or (figures.wall_s or 0.0) <= SHORT_S:
        return None

    lost_s = {name: seconds for name, seconds in figures.time_s.items() if name != PRODUCTIVE}
    largest_category = max(lost_s, key=lambda name: lost_s[name], default="")
    if largest_category not in LOSSES:
        return None
    advice, where = LOSSES[largest_category]
    if run.is_own:
        advice = f"{advice} ({where})"
    share = lost_s[largest_category] / (figures.wall_s or 1)
    return Recommendation(lost_s[largest_category], f"{share:.0%} of the time was lost ({largest_category})", advice)


def _find_slow_steps(run: Record, figures: Figures) -> Recommendation | None:
    """Return a recommendation for slow steps. Its cost is the time beyond the plan or, if longer, that of the cause."""
    productive_s = figures.time_s.get(PRODUCTIVE) or sum((s.seconds or 0.0) * s.count for s in run.steps)
    planned, measured = figures.planned, figures.rate
    slowdown = 0.0
    if planned and measured and not run.rehearsal:
        slowdown = planned.rate / measured - 1
    beyond_plan_s = 0.0
    if slowdown > TOLERANCE:
        beyond_plan_s = productive_s * slowdown / (1 + slowdown)

    if run.waiting and run.waiting > MAX_WAITING_SHARE:
        cost_s = max(beyond_plan_s, run.waiting * productive_s)
        advice = "increase data.num_workers, or use faster storage"
        return Recommendation(cost_s, f"{run.waiting:.0%} of a step is spent waiting for data", advice)

    if figures.drift is not None and figures.drift > TOLERANCE and not run.rehearsal:
        # Half of the drift: the steps became slower gradually.
        cost_s = max(beyond_plan_s, productive_s * figures.drift / 2 / (1 + figures.drift))
        problem = f"steps became {figures.drift:.0%} slower during the run"
        return Recommendation(cost_s, problem, "see docs/troubleshooting.md#slow")

    if slowdown > TOLERANCE:
        advice = "see docs/troubleshooting.md#slow, which covers causes from the layout to a single network card"
        return Recommendation(beyond_plan_s, f"{slowdown:.0%} slower than planned", advice)
    return None


def _suggest_check(run: Record) -> str:
    """Return the advice to plan the real run after a rehearsal that is done; "" for others."""
    if run.state != State.DONE:
        return ""
    name = run.path.parent.name
    return f"the speed of a rehearsal is not representative of GPUs: `recipes check {name}` plans the real run"


def _suggest_faster_layout(run: Record, figures: Figures) -> str:
    """Return the best single change to the layout or options, for a run that is not slower than planned.

    If a run is faster than planned, `report` recommends `recipes calibrate`.
    """
    from superpod.planner import predict, suggestions

    planned, measured = figures.planned, figures.rate
    if planned is None or not measured or run.job is None:
        return ""
    is_faster = planned.rate / measured - 1 < -TOLERANCE
    speed = "faster than planned" if is_faster else "as planned"
    changes = suggestions.faster_changes(run.job, predict.one(run.job), count=1)
    if not changes:
        return f"{speed}, and no single change is faster"
    return f"{speed}; {changes[0]}, according to the planner"


def _describe_loss_anomaly(run: Record) -> str:
    """Describe an anomaly of the losses: a non-finite loss, a jump, or a lasting rise; "" if there is none."""
    if run.remark:
        return run.remark
    from superpod.diagnosis.log_lines import LogLine
    from superpod.diagnosis.losses import Point, Series

    series = Series()
    for step in run.steps:
        loss = math.nan if step.bad_loss else step.loss
        series.add_point(Point(step.step, loss, LogLine(run.path, step.step, "")))
    return next((anomaly.message for anomaly in series.anomalies()), "")
