"""The first and last loss of a run, and the steps with a non-finite loss. Losses in nats per token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from superpod.errors import counted


@dataclass(frozen=True)
class LossSummary:
    """First and last loss of a run, and its steps with a non-finite loss; None for unknown values."""

    start: float | None = None
    """the first finite loss"""
    end: float | None = None
    """the last loss; None if it is non-finite"""
    last: float | None = None
    """the last finite loss, and its step"""
    last_step: int | None = None
    bad: int = 0
    """number of steps with a non-finite loss: nan, inf, or null in metrics.jsonl"""
    bad_from: int | None = None
    bad_to: int | None = None

    @property
    def text(self) -> str:
        """A text such as `8.3361 -> 5.2498 nats/token`, with the steps of non-finite losses; "" without losses."""
        finite = ""
        if self.start is not None:
            finite = f"{self.start:.4f} -> {self.last:.4f} nats/token"
            if self.end is None:
                finite += f" at step {self.last_step:,}"
        if not self.bad:
            return finite

        steps_text = f"step {self.bad_from:,}" if self.bad == 1 else f"steps {self.bad_from:,} to {self.bad_to:,}"
        bad = f"non-finite (nan, inf) at {counted(self.bad, 'step')}: {steps_text}"
        if not finite:
            return bad
        if self.end is None:
            bad += ", until the end"
        return f"{finite}; {bad}"


def summarize_losses(losses: Iterable[tuple[int, float | None]]) -> LossSummary:
    """Return the summary of (step, loss) pairs in step order. A loss of None is non-finite."""
    points = [*losses]
    finite = [(step, loss) for step, loss in points if loss is not None]
    bad = [step for step, loss in points if loss is None]
    return LossSummary(
        start=finite[0][1] if finite else None,
        end=points[-1][1] if points else None,
        last=finite[-1][1] if finite else None,
        last_step=finite[-1][0] if finite else None,
        bad=len(bad),
        bad_from=bad[0] if bad else None,
        bad_to=bad[-1] if bad else None,
    )
