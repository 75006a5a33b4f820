"""The next move after a run, in a line: what hurts most of what its figures show, and the command that helps."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING

from superpod.errors import counted
from superpod.runtime.runs.run_state import State

if TYPE_CHECKING:
    from superpod.reports.report_figures import Figures
    from superpod.reports.runs.run_record import Record

FAR = 0.1
"""A run that is so far from its plan is worth looking into."""
SHORT_S = 1800.0
"""Of a shorter run the start takes much, whatever one does."""
WAITING = 0.1
"""Share of a step spent in waiting for data that is worth a change."""


def recommend(run: Record, figures: Figures) -> str:
    """One move, the most urgent; '' where the figures call for none."""
    path = shlex.quote(str(run.path))
    if run.state in (State.FAILED, State.STALLED):
        return f"recipes why {path} names what ended it"
    if remark := _remark(run):
        return f"{remark}: recipes why {path} has the lines"
    beside, within = _beside_steps(run, figures), _within_steps(run, figures)
    if beside or within:  # the same GPUs wait for both: the one that takes more seconds costs more GPU hours
        cost_s, words = max(filter(None, (beside, within)), key=lambda move: move[0])
        return _with_hours(words, cost_s, run.gpus if not run.rehearsal else None)
    return _as_planned(run, figures) if not run.rehearsal else _of_rehearsal(run)


def _with_hours(words: str, cost_s: float, gpus: int | None) -> str:
    """The words with what it costs, before the advice."""
    what, colon, advice = words.partition(":")
    hours = cost_s * (gpus or 0) / 3600
    return f"{what}, some {counted(round(hours), 'GPU hour')}{colon}{advice}" if hours >= 1 else words


def _beside_steps(run: Record, figures: Figures) -> Move | None:
    """What most of the time goes for that is no step that counts, of a long run."""
    lost = {name: s for name, s in figures.time_s.items() if name != "steps that count"}
    worst = max(lost, key=lambda name: lost[name], default="")
    is_long = (figures.wall_s or 0.0) > SHORT_S and not run.rehearsal
    if figures.goodput is None or figures.goodput >= 1 - FAR or worst not in LOSSES or not is_long:
        return None
    advice, where = LOSSES[worst]
    share = lost[worst] / (figures.wall_s or 1)
    return lost[worst], f"{share:.0%} of the time went for {worst}: {advice}" + f" ({where})" * run.is_own


def _within_steps(run: Record, figures: Figures) -> Move | None:
    """What makes the steps themselves slow: its seconds are those beyond the plan, or else its own."""
    useful_s = figures.time_s.get("steps that count") or sum((s.seconds or 0.0) * s.count for s in run.steps)
    planned, measured = figures.planned, figures.rate
    off = planned.rate / measured - 1 if planned and measured and not run.rehearsal else 0.0
    beyond_s = useful_s * off / (1 + off) if off > FAR else 0.0
    if run.waiting and run.waiting > WAITING:
        words = f"{run.waiting:.0%} of a step waits for data: more data.num_workers, or faster storage"
        return max(beyond_s, run.waiting * useful_s), words
    if figures.drift is not None and figures.drift > FAR and not run.rehearsal:
        words = f"steps became {figures.drift:.0%} slower during the run: docs/troubleshooting.md#slow"
        return max(beyond_s, useful_s * figures.drift / 2 / (1 + figures.drift)), words  # half: it grew slowly
    if off > FAR:
        where = "docs/troubleshooting.md#slow, from the layout to a single network card"
        return beyond_s, f"{off:.0%} below its plan: {where}"
    return None


Move = tuple[float, str]
"""Seconds that it costs, and the move in words."""


LOSSES = {
    "repeated steps": ("save more often", "log.ckpt.every_n_train_steps"),
    "starting": ("longer attempts", "docs/slurm.md has what a start consists of"),
    "saves and pauses": ("save less often, or asynchronously", "log.ckpt.every_n_train_steps"),
    "validation": ("validate less", "trainer.val_check_interval, trainer.limit_val_batches"),
    "between attempts": ("the queue, or a node that was missing", "recipes history shows the attempts"),
    "ending": ("mostly its last save", "docs/checkpoints.md"),
}
"""Where time is lost -> what helps, and where a run of this project sets it."""


def _of_rehearsal(run: Record) -> str:
    if run.state != State.DONE:
        return ""
    return f"a rehearsal's speed says nothing of GPUs: recipes check {run.path.parent.name} plans the real run"


def _as_planned(run: Record, figures: Figures) -> str:
    """The single change of layout or options that the planner expects most of, of a run that is no slower than planned.

    What a faster run says of the planner stands beside its plan: `report` offers `recipes calibrate` there.
    """
    from superpod.planner import explain, predict

    planned, measured = figures.planned, figures.rate
    if planned is None or not measured or run.job is None:
        return ""
    head = "faster than planned" if planned.rate / measured - 1 < -FAR else "as planned"
    changes = explain.faster_changes(run.job, predict.one(run.job), most=1)
    return f"{head}; {changes[0]}, by the planner" if changes else f"{head}, and no single change is faster"


def _remark(run: Record) -> str:
    """What the losses tell: none that is a number, a jump, or a rise for good."""
    if run.remark:
        return run.remark
    from superpod.diagnosis.log_lines import LogLine
    from superpod.diagnosis.losses import Point, Series

    series = Series()
    for step in run.steps:
        loss = math.nan if step.bad_loss else step.loss
        series.note(Point(step.step, loss, LogLine(run.path, step.step, "")))
    return next((remark.words for remark in series.remarks()), "")
