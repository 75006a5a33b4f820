"""What the lines of steps tell by their numbers: losses that are none, jump or rise, and waiting for data.

The lines of Megatron-LM, NeMo, Lightning, Hugging Face, torchtitan and DeepSpeed are read. Standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from superpod.diagnosis.log_lines import LogLine

_NUMBER = r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|NaN|inf|Inf))"
_STEPS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\biteration[: ]\s*(\d+)\s*/\s*\d+",
        r"\bglobal_step['\"]?[:= ]+(\d+)",
        r"\biter(?:ation)?[: =]+(\d+)\b",
        r"\b(?:[Ss]tep|STEP)['\"]?[:= #]+(\d+)\b",
        r"\|\s*(\d+)/\d+ \[\d+:\d\d",
        r"\bsteps?[: =]+(\d+)/\d+",
        r"\bEpoch\b.*\[ *(\d+)/\d+\]",
    )
)
_EPOCH = re.compile(r"\bepoch['\"]?[:= ]+\[?([\d.]+)", re.IGNORECASE)
_LOSS = re.compile(
    rf"(?<![\w-])(?:lm[ _]loss|reduced_train_loss|train(?:ing)?[_/ ]loss|loss)(?: value)?['\"]?\s*[:=]\s*{_NUMBER}",
    re.IGNORECASE,
)
_GRAD = re.compile(rf"grad(?:ient)?[ _]norm['\"]?\s*[:=]\s*{_NUMBER}", re.IGNORECASE)
_STEP_TIME = re.compile(
    r"(?:elapsed time per iteration \(ms\):|train_step_timing in s:|step_time(?:_s)?['\"]?[:=])\s*([\d.]+)"
)
_DATA_SHARE = re.compile(r"data[_ ]loading\(%\)['\"]?[:=]\s*([\d.]+)")
_DATA_TIME = re.compile(
    r"(?:batch-generator \.*: \([\d.]+, |data[_ ](?:loading[_ ])?time(?:_s)?(?: \(ms\))?['\"]?[:=]\s*)([\d.]+)"
)

_OVERFLOW = re.compile(
    r"overflow.*(?:loss scale: ([\d.e+-]+), reducing to|setting loss scale to:|reducing loss scale to) ?([\d.e+-]+)",
    re.IGNORECASE,
)
"""DeepSpeed, Apex or fairseq skips a step and lowers the loss scale, where it can."""
MOST_OVERFLOWS, MOST_AT_LOW_SCALES, LOW_SCALE = 5, 2, 128
"""Overflows in a row from which on the training learns nothing: of all, and of those that left so low a scale."""
USUAL_SCALE = 1 << 16
"""Overflows that leave a larger scale are the search for one, with which a training begins."""
_SKIPPED = re.compile(r"\bstep=(\d+), skipped=(\d+)\b")
"""DeepSpeed: steps so far, and how many of them were skipped."""
GOOD_STEPS = 3
"""Steps after an overflow or an error with which the training came through it."""
BAD_GRADS = 2
"""Reports in a row of a gradient whose norm is not a number, as many."""

WINDOW = 20
LEAST = 8
"""Losses that are compared with; fewer tell nothing."""
JUMP, JUMP_BY, DEVIATIONS = 1.35, 0.25, 8.0
"""A spike is so many times the median of WINDOW losses, so much above it, and so many usual deviations."""
RISEN, RISEN_BY = 1.2, 0.3
"""A loss has diverged when the last ones lie so far above the lowest, in times and in nats."""
WAITING = 0.3
"""Share of a step spent in waiting for data, from which on it is said."""
MOST = 20_000


@dataclass(frozen=True)
class Point:
    """A step that a log or metrics.jsonl tells of."""

    step: int
    loss: float | None
    line: LogLine
    epoch: float | None = None

    @property
    def place(self) -> tuple[float, int]:
        """Where in a training it is: a part of an epoch says it alone, steps may be counted within epochs."""
        epoch = self.epoch or 0.0
        return epoch, self.step if epoch.is_integer() else 0

    def is_behind(self, other: Point) -> bool:
        """Whether the same rank reported an earlier place of a training."""
        if self.line.rank != other.line.rank or (self.epoch is None) != (other.epoch is None):
            return False
        return self.place < other.place


@dataclass(frozen=True)
class Remark:
    """Something that the numbers tell: the cause's name, in words, and where."""

    cause: str
    words: str
    line: LogLine
    lasts: bool = True
    """False where the training came out of it by itself"""


@dataclass
class Series:
    """The steps of one log."""

    points: list[Point] = field(default_factory=list)
    bad_points: list[Point] = field(default_factory=list)
    """steps whose loss is not a number"""
    first_bad: Point | None = None
    bad: int = 0
    """steps in a row, up to the last one, whose loss is not a number"""
    bad_grads: int = 0
    last_bad_grad: LogLine | None = None
    overflows: int = 0
    at_low_scales: int = 0
    """steps in a row, up to the last one, that were skipped for an overflow; and how many of them at low scales"""
    last_overflow: LogLine | None = None
    good_steps: int = 0
    """steps that were not skipped, by DeepSpeed's newest report"""
    waiting: list[tuple[float, LogLine]] = field(default_factory=list)
    """share of each step spent in waiting for data"""
    step_s: float = 0.0
    last_steps: list[tuple[int, int]] = field(default_factory=list)
    """(line number, step) of steps that were seen first there"""
    highest: int = -1
    runs: int = 0
    """how many runs began in the log"""
    _first: Point | None = None
    """the first loss of the newest run"""
    _newest: Point | None = None
    _has_ended: bool = False
    """whether the newest run has come to its end"""

    def end(self) -> None:
        """Take that a training came to its end."""
        self._has_ended = True

    def take(self, line: LogLine) -> bool:
        """Note what a line says of a step; whether it is of one."""
        self._take_waiting(line)
        if overflow := _OVERFLOW.search(line.text):
            scale = float(overflow[2].rstrip("."))
            if not overflow[1] or scale < USUAL_SCALE:
                self._take_overflow(line, low=bool(overflow[1]) and scale < LOW_SCALE)
            return True
        if skipped := _SKIPPED.search(line.text):
            self._take_good_steps(int(skipped[1]) - int(skipped[2]))
        step, loss = _step_of(line.text), _matched_number(_LOSS.search(line.text))
        if step is None and loss is not None and line.text.lstrip().startswith("{'loss'"):
            step = self.highest + 1  # of Hugging Face's trainer: its progress bar has the step
        if step is None:
            return False
        epoch = _EPOCH.search(line.text)
        self.note(Point(step, loss, line, _matched_number(epoch)))
        grad = _matched_number(_GRAD.search(line.text))
        if grad is not None:
            self.bad_grads = self.bad_grads + 1 if math.isnan(grad) else 0
            self.last_bad_grad = line
        return True

    def _take_overflow(self, line: LogLine, low: bool) -> None:
        if self._came_through():
            self.overflows = self.at_low_scales = 0
        self.overflows += 1
        self.at_low_scales += low
        self.last_overflow = line

    def _take_good_steps(self, good: int) -> None:
        if good - self.good_steps >= GOOD_STEPS:
            self.overflows = self.at_low_scales = 0
        self.good_steps = good

    def _came_through(self) -> bool:
        """Whether steps followed the newest overflow."""
        return self.last_overflow is None or self.steps_after(self.last_overflow.number) >= GOOD_STEPS

    def note(self, point: Point) -> None:
        """Add a step."""
        if point.step != self.highest:
            self.highest = point.step
            self.last_steps.append((point.line.number, point.step))
            if len(self.last_steps) > MOST:
                del self.last_steps[1 : len(self.last_steps) // 2]
        if point.loss is None:
            return
        if self._begins_anew(point):
            self._begin()
        self._first, self._newest = self._first or point, point
        if math.isfinite(point.loss):
            self.bad, self.first_bad = 0, None
            self.points.append(point)
            if len(self.points) > MOST:
                del self.points[::2]
        else:
            self.first_bad = self.first_bad or point
            self.bad += 1
            if len(self.bad_points) < MOST:
                self.bad_points.append(point)

    def _begins_anew(self, point: Point) -> bool:
        """Whether a step is of another run, which the same log was given to: it goes back to where one starts."""
        if self._first is None or self._newest is None or not point.is_behind(self._newest):
            return False
        if self._has_ended and point.step <= self._newest.step / 2:
            return True
        return not self._first.is_behind(point)

    def _begin(self) -> None:
        """Forget what the numbers of an earlier run tell."""
        self.runs += 1
        self._first, self._has_ended = None, False
        self.points, self.bad_points, self.waiting = [], [], []
        self.first_bad, self.bad = None, 0
        self.last_bad_grad, self.bad_grads = None, 0
        self.last_overflow, self.overflows, self.at_low_scales, self.good_steps = None, 0, 0, 0

    def steps_after(self, number: int) -> int:
        """How many other steps were reported after a line."""
        return len({step for at, step in self.last_steps[-50:] if at > number})

    def went_on_after(self, number: int) -> bool:
        """Whether the training went on after a line, or began after it: ranks report a step or two out of turn."""
        began = any(at <= number for at, _ in self.last_steps)
        return self.steps_after(number) >= (GOOD_STEPS if began else 1)

    def _take_waiting(self, line: LogLine) -> None:
        if match := _STEP_TIME.search(line.text):
            self.step_s = float(match[1])
        if match := _DATA_SHARE.search(line.text):
            self.waiting.append((float(match[1]) / 100, line))
        elif (match := _DATA_TIME.search(line.text)) and self.step_s:
            self.waiting.append((float(match[1]) / self.step_s, line))

    def remarks(self) -> list[Remark]:
        """What the numbers tell, the gravest first."""
        return [
            remark
            for remark in (self._bad(), self._overflow(), *_spike_or_rise(self.points), self._waiting())
            if remark
        ]

    def _bad(self) -> Remark | None:
        if self.first_bad and self.bad >= 1:
            step, loss = self.first_bad.step, self.first_bad.loss
            before = f", and it was {self.points[-1].loss:.4g} at step {self.points[-1].step}" if self.points else ""
            words = f"the loss is {loss} from step {step} on{before}"
            return Remark("loss_is_nan", words, self.first_bad.line)
        if self.last_bad_grad and self.bad_grads >= BAD_GRADS:
            words = f"the gradient's norm is nan for {self.bad_grads} reports, up to step {self.highest}"
            return Remark("loss_is_nan", words, self.last_bad_grad)
        return None

    def _overflow(self) -> Remark | None:
        gone = self.overflows >= MOST_OVERFLOWS or self.at_low_scales >= MOST_AT_LOW_SCALES
        if self.last_overflow is None or not gone or self._came_through():
            return None
        where = " at a loss scale that cannot fall much further" if self.at_low_scales else ", whatever the loss scale"
        message = f"the last {self.overflows} steps were skipped: gradients overflow{where}"
        return Remark("fp16_overflow", message, self.last_overflow)

    def _waiting(self) -> Remark | None:
        shares = [share for share, _ in self.waiting]
        if len(shares) < 3 or median(shares[1:]) < WAITING:
            return None
        share, line = max(self.waiting[1:], key=lambda waited: waited[0])
        return Remark(
            "slow_data", f"{median(shares[1:]):.0%} of a step is spent in waiting for data, up to {share:.0%}", line
        )


def _spike_or_rise(points: Sequence[Point]) -> list[Remark]:
    """A loss that rose for good, or a jump of one step or a few; not of the first steps, which jump."""
    losses = [point.loss or 0.0 for point in points]
    if len(losses) < 2 * LEAST:
        return []
    smooth = [median(losses[max(0, i - 2) : i + 3]) for i in range(len(losses))]
    lowest = min(range(len(smooth)), key=smooth.__getitem__)
    last = max(median(losses[-max(5, len(losses) // 10) :]), min(losses[-3:]))
    rises = lowest < len(losses) - 3 and last > RISEN * smooth[lowest] and last > smooth[lowest] + RISEN_BY
    spike = _spike(points, losses)
    noise = median([abs(b - a) for a, b in zip(losses, losses[1:])])
    if rises and last > smooth[lowest] + 6 * noise:
        fell = f"the loss fell to {smooth[lowest]:.4g} at step {points[lowest].step}"
        words = f"{fell}, and is {last:.4g} at step {points[-1].step}"
        begin = next((p for p in points[lowest:] if (p.loss or 0.0) > RISEN * smooth[lowest]), points[-1])
        return [Remark("loss_diverged", words, begin.line)]
    return [spike] if spike else []


def _spike(points: Sequence[Point], losses: list[float]) -> Remark | None:
    worst: tuple[float, int] = (0.0, -1)
    for i in range(LEAST, len(losses)):
        window = losses[max(0, i - WINDOW) : i]
        middle = median(window)
        spread = 1.4826 * median([abs(loss - middle) for loss in window])
        jump = losses[i] - middle
        if (
            losses[i] > JUMP * middle
            and jump > JUMP_BY
            and jump > DEVIATIONS * spread
            and losses[i] > 1.15 * max(window)
        ):
            worst = max(worst, (jump, i))
    if worst[1] < 0:
        return None
    at = points[worst[1]]
    return Remark(
        "loss_spike", f"the loss jumped by {worst[0]:.3g} to {at.loss:.4g} at step {at.step}", at.line, lasts=False
    )


def _step_of(text: str) -> int | None:
    lowered = text.lower()
    if "validation" in lowered or "eval" in lowered:
        return None
    if not any(word in lowered for word in ("iter", "step", "it/s", "s/it", "epoch")):
        return None
    has_numbers = "loss" in lowered or "it/s" in lowered or "s/it" in lowered or "|" in lowered or "elapsed" in lowered
    if not has_numbers:
        return None
    return next((int(match[1]) for pattern in _STEPS if (match := pattern.search(text))), None)


def _matched_number(match: re.Match[str] | None) -> float | None:
    if match is None:
        return None
    try:
        return float(match[1])
    except ValueError:
        return None
