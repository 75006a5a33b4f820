"""Where the losses of a run begin and end, and at which steps they were no number. Losses in nats per token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from superpod.errors import counted


@dataclass(frozen=True)
class LossSummary:
    """The losses of a run's steps; None for what is not known."""

    start: float | None = None
    """the first that is a number"""
    end: float | None = None
    """the last one; None where that is no number"""
    last: float | None = None
    """the last that is a number, and its step"""
    last_step: int | None = None
    bad: int = 0
    """steps whose loss is no number: nan, inf, or null in metrics.jsonl"""
    bad_from: int | None = None
    bad_to: int | None = None

    @property
    def words(self) -> str:
        """`8.3361 -> 5.2498 nats/token`, and at how many steps there was no number; '' of no losses."""
        known = ""
        if self.start is not None:
            at = f" at step {self.last_step:,}" if self.end is None else ""
            known = f"{self.start:.4f} -> {self.last:.4f} nats/token{at}"
        if not self.bad:
            return known
        where = f"step {self.bad_from:,}" if self.bad == 1 else f"steps {self.bad_from:,} to {self.bad_to:,}"
        bad = f"no number (nan, inf) at {counted(self.bad, 'step')}: {where}"
        return f"{known}; {bad}{', and the run ends so' * (self.end is None)}" if known else bad


def summarize_losses(reported: Iterable[tuple[int, float | None]]) -> LossSummary:
    """Of the steps that reported a loss, in their order; None is one that is no number."""
    points = [*reported]
    numbers = [(step, loss) for step, loss in points if loss is not None]
    bad = [step for step, loss in points if loss is None]
    return LossSummary(
        start=numbers[0][1] if numbers else None,
        end=points[-1][1] if points else None,
        last=numbers[-1][1] if numbers else None,
        last_step=numbers[-1][0] if numbers else None,
        bad=len(bad),
        bad_from=bad[0] if bad else None,
        bad_to=bad[-1] if bad else None,
    )
