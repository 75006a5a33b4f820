"""Shorten the learning-rate schedule of a run that has fewer steps than its recipe. Does not import NeMo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from superpod.nemo2.validation import values
from superpod.nemo2.validation.reading import is_overridden

if TYPE_CHECKING:
    import nemo_run as run

STEPS = "trainer.max_steps"
SCHEDULE = "optim.lr_scheduler"
PHASES = ("warmup_steps", "constant_steps")
"""Fields of `SCHEDULE` that are numbers of steps; the decay takes the remaining steps."""
SHARE = 10
"""A phase takes at most 1 / `SHARE` of the steps."""


def shorten(phase: int, steps: int) -> int:
    """Return the number of steps of a phase in a run of `steps` steps: at most a tenth of the run."""
    return min(phase, steps // SHARE)


def fit(partial: run.Partial, overrides: Sequence[str]) -> None:
    """Shorten the phases of the schedule if `overrides` set the number of steps; overridden phases stay unchanged."""
    steps = partial.trainer.max_steps
    if not is_overridden(overrides, STEPS) or not isinstance(steps, int):
        return
    schedule = partial.optim.lr_scheduler
    for name in PHASES:
        phase = getattr(schedule, name, None)
        if isinstance(phase, int) and not is_overridden(overrides, f"{SCHEDULE}.{name}"):
            setattr(schedule, name, shorten(phase, steps))


def notes(warmup: int, overrides: Sequence[str]) -> list[str]:
    """Return a note for the user if `fit` will shorten the recipe's warm-up."""
    steps = values.literal(values.assigned_values(overrides).get(STEPS, ""))
    if type(steps) is not int or steps < 1 or is_overridden(overrides, f"{SCHEDULE}.warmup_steps"):
        return []
    shorter = shorten(warmup, steps)
    if shorter == warmup:
        return []
    return [f"warm-up shortened from {warmup} to {shorter} steps: at most a tenth of {STEPS}={steps}"]
