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
"""Fields of `SCHEDULE` with the number of steps of a phase; the decay takes the remaining steps."""


def shorten(phase: int, steps: int) -> int:
    """Return the length of a phase of `phase` steps in a run of `steps` steps: at most a tenth of the run."""
    return min(phase, steps // 10)


def fit(partial: run.Partial, overrides: Sequence[str]) -> None:
    """Shorten the phases of a recipe's schedule if `overrides` set its steps; overridden phases stay unchanged."""
    steps = partial.trainer.max_steps
    if not is_overridden(overrides, STEPS) or not isinstance(steps, int):
        return
    schedule = partial.optim.lr_scheduler
    for name in PHASES:
        phase = getattr(schedule, name, None)
        if isinstance(phase, int) and not is_overridden(overrides, f"{SCHEDULE}.{name}"):
            setattr(schedule, name, shorten(phase, steps))


def notes(warmup: int, overrides: Sequence[str]) -> list[str]:
    """Return [note] if `fit` will shorten a warm-up of `warmup` steps because of `overrides`; otherwise []."""
    steps = values.literal(values.assigned_values(overrides).get(STEPS, ""))
    if type(steps) is not int or steps < 1 or is_overridden(overrides, f"{SCHEDULE}.warmup_steps"):
        return []
    shorter = shorten(warmup, steps)
    note = f"warm-up shortened from {warmup} to {shorter} steps: at most a tenth of {STEPS}={steps}"
    return [note] if shorter < warmup else []
