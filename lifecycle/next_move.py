"""The next move after a run, in a line: what hurts most of what its figures show, and the command that helps."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from superpod.lifecycle.report_figures import Figures
    from superpod.lifecycle.run_record import Record

FAR = 0.1
"""A run that is so far from its plan is worth looking into."""
SHORT_S = 1800.0
"""Of a shorter run the start takes much, whatever one does."""
WAITING = 0.1
"""Share of a step spent in waiting for data that is worth a change."""


def of(run: Record, figures: Figures) -> str:
    """One move, the most urgent; '' where the figures call for none."""
    path = shlex.quote(str(run.path))
    if run.state in ("failed", "stalled"):
        return f"recipes why {path} names what ended it"
    if remark := _remark(run):
        return f"{remark}: recipes why {path} has the lines"
    lost = {name: s for name, s in figures.time_s.items() if name != "steps that count"}
    worst = max(lost, key=lambda name: lost[name], default="")
    is_long = (figures.wall_s or 0.0) > SHORT_S and not run.rehearsal
    if figures.goodput is not None and figures.goodput < 1 - FAR and worst in LOSSES and is_long:
        advice, where = LOSSES[worst]
        share = lost[worst] / (figures.wall_s or 1)
        return f"{share:.0%} of the time went for {worst}: {advice}" + f" ({where})" * run.is_own
    if run.waiting and run.waiting > WAITING:
        return f"{run.waiting:.0%} of a step waits for data: more data.num_workers, or faster storage"
    if figures.drift is not None and figures.drift > FAR and not run.rehearsal:
        return f"steps became {figures.drift:.0%} slower during the run: docs/troubleshooting.md#slow"
    return _of_plan(run, figures, path) if not run.rehearsal else _of_rehearsal(run)


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
    if run.state != "done":
        return ""
    return f"a rehearsal's speed says nothing of GPUs: recipes check {run.path.parent.name} plans the real run"


def _of_plan(run: Record, figures: Figures, path: str) -> str:
    planned, measured = figures.planned, figures.rate
    if planned is None or not measured:
        return ""
    off = planned.rate / measured - 1
    if off > FAR:
        return f"{off:.0%} below its plan: docs/troubleshooting.md#slow, from the layout to a single network card"
    if off < -FAR and run.is_own and run.state == "done":
        return f"faster than planned: recipes calibrate {path} --out mine.toml plans with it"
    return _better(run)


def _better(run: Record) -> str:
    """The single change of layout or options that the planner expects most of."""
    from superpod.planner import explain, predict

    if run.job is None:
        return ""
    changes = explain.better(run.job, predict.one(run.job), most=1)
    return f"as planned; {changes[0]}, by the planner" if changes else "as planned, and no single change is faster"


def _remark(run: Record) -> str:
    """What the losses tell: none that is a number, a jump, or a rise for good."""
    if run.remark:
        return run.remark
    from superpod.node.log_lines import LogLine
    from superpod.node.losses import Point, Series

    series = Series()
    for step in run.steps:
        series.note(Point(step.step, step.loss, LogLine(run.path, step.step, "")))
    return next((remark.words for remark in series.remarks()), "")
