"""Detect NaN, spikes and divergence of the loss, FP16 overflow, and slow data in the step reports of a log.

Supports the formats of Megatron-LM, NeMo, Lightning, Hugging Face, torchtitan and DeepSpeed. Standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from superpod.diagnosis.log_lines import LogLine

_NUMBER = r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|NaN|inf|Inf(?:inity)?))"
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
    rf"(?<![\w-])(?:lm[ _]loss|reduced_train_loss|train(?:ing)?[_/ ]loss|loss)(?: value)?"
    rf"(?:['\"]?\s*[:=]\s*|\s(?:is\s)?){_NUMBER}",
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
"""Lines in which DeepSpeed, Apex or fairseq report a skipped step, and the new loss scale if it was lowered."""
MAX_OVERFLOWS, MAX_AT_LOW_SCALES, LOW_SCALE = 5, 2, 128
"""Numbers of consecutive overflows that mean that training has failed: in total, and at scales below LOW_SCALE."""
USUAL_SCALE = 1 << 16
"""Overflows at larger loss scales are part of the initial search for a scale."""
_SKIPPED = re.compile(r"\bstep=(\d+), skipped=(\d+)\b")
"""Names of DeepSpeed's counters of steps and skipped steps."""
GOOD_STEPS = 3
"""Number of steps after an overflow or error after which training counts as recovered."""
BAD_GRADS = 2
"""Minimum number of consecutive NaN gradient norms that are reported."""

WINDOW = 20
MIN_COMPARED = 8
"""Maximum and minimum number of previous losses with which a loss is compared to detect a spike."""
JUMP, JUMP_BY, DEVIATIONS = 1.35, 0.25, 8.0
"""A spike exceeds the median of WINDOW losses by this factor, by this difference in nats, and by this many standard
deviations."""
RISEN, RISEN_BY = 1.2, 0.3
"""The loss has diverged if the last losses exceed the lowest one by this factor and by this difference in nats."""
MAX_WAITING_SHARE = 0.3
"""Minimum share of the step time spent waiting for data that is reported."""
MAX_STEPS = 20_000
"""Maximum number of steps to keep."""


@dataclass(frozen=True)
class Point:
    """A step reported in a log or in metrics.jsonl."""

    step: int
    loss: float | None
    line: LogLine
    epoch: float | None = None

    @property
    def position(self) -> tuple[float, int]:
        """The position in the training as (epoch, step); step is 0 if the epoch is fractional.

        Some programs count steps within an integer epoch, so steps alone do not order the points.
        """
        epoch = self.epoch or 0.0
        return epoch, self.step if epoch.is_integer() else 0

    def is_before(self, other: Point) -> bool:
        """Return whether this step precedes `other` in the training; False if different ranks reported them."""
        if self.line.rank != other.line.rank or (self.epoch is None) != (other.epoch is None):
            return False
        return self.position < other.position


@dataclass(frozen=True)
class Anomaly:
    """Abnormal losses, gradients or step times."""

    cause: str
    """name of a `Cause`"""
    message: str
    line: LogLine
    lasts: bool = True
    """False if the training recovered"""


@dataclass
class Series:
    """The training steps reported in one log. If it contains several runs, losses and counts are the newest run's."""

    points: list[Point] = field(default_factory=list)
    """steps with a finite loss"""
    bad_points: list[Point] = field(default_factory=list)
    """steps with a non-finite loss"""
    first_bad: Point | None = None
    """the first of the consecutive non-finite losses up to the last step"""
    bad_grads: int = 0
    """number of consecutive NaN gradient norms, up to the last step"""
    last_grad: LogLine | None = None
    """the newest line with a gradient norm"""
    overflows: int = 0
    """number of consecutive steps skipped because of an overflow, up to the last step"""
    at_low_scales: int = 0
    """number of these steps with a loss scale below LOW_SCALE"""
    last_overflow: LogLine | None = None
    good_steps: int = 0
    """number of steps that were not skipped, in DeepSpeed's newest report"""
    waiting: list[tuple[float, LogLine]] = field(default_factory=list)
    """(share of the step time spent waiting for data, line) for each report"""
    step_s: float = 0.0
    """the newest step time, in the unit of the log"""
    last_steps: list[tuple[int, int]] = field(default_factory=list)
    """(line number, step) for the first report of each step"""
    highest: int = -1
    """the newest step; -1 = none"""
    runs: int = 0
    """number of runs that began in the log after the first one"""
    _first: Point | None = None
    """the first loss of the newest run"""
    _newest: Point | None = None
    _has_ended: bool = False
    """whether the newest run has ended"""

    def end(self) -> None:
        """Record that the newest run has ended."""
        self._has_ended = True

    def add_line(self, line: LogLine) -> bool:
        """Record what a line reports about a step; return whether it reports a step."""
        self._record_waiting(line)
        overflow = _OVERFLOW.search(line.text)
        if overflow:
            scale = float(overflow[2].rstrip("."))
            if not overflow[1] or scale < USUAL_SCALE:
                self._record_overflow(line, is_low=bool(overflow[1]) and scale < LOW_SCALE)
            return True

        skipped_match = _SKIPPED.search(line.text)
        if skipped_match:
            good_steps = int(skipped_match[1]) - int(skipped_match[2])
            if good_steps - self.good_steps >= GOOD_STEPS:
                self.overflows = self.at_low_scales = 0
            self.good_steps = good_steps
        step, loss = _step_of(line.text), _matched_number(_LOSS.search(line.text))
        if step is None and loss is not None and line.text.lstrip().startswith("{'loss'"):
            step = self.highest + 1  # Hugging Face's trainer reports the step only in its progress bar
        if step is None:
            return False
        epoch = _EPOCH.search(line.text)
        self.add_point(Point(step, loss, line, _matched_number(epoch)))
        grad = _matched_number(_GRAD.search(line.text))
        if grad is not None:
            self.bad_grads = self.bad_grads + 1 if math.isnan(grad) else 0
            self.last_grad = line
        return True

    def _record_overflow(self, line: LogLine, is_low: bool) -> None:
        if self._has_recovered():
            self.overflows = self.at_low_scales = 0
        self.overflows += 1
        self.at_low_scales += is_low
        self.last_overflow = line

    def _has_recovered(self) -> bool:
        """Return whether at least GOOD_STEPS steps followed the newest overflow, or there was no overflow."""
        return self.last_overflow is None or self.steps_after(self.last_overflow.number) >= GOOD_STEPS

    def add_point(self, point: Point) -> None:
        """Record a reported step, which may begin another run."""
        if point.step != self.highest:
            self.highest = point.step
            self.last_steps.append((point.line.number, point.step))
            if len(self.last_steps) > MAX_STEPS:
                del self.last_steps[1 : len(self.last_steps) // 2]
        if point.loss is None:
            return
        if self._begins_run(point):
            self._begin_run()
        self._first, self._newest = self._first or point, point
        if math.isfinite(point.loss):
            self.first_bad = None
            self.points.append(point)
            if len(self.points) > MAX_STEPS:
                del self.points[::2]
        else:
            self.first_bad = self.first_bad or point
            if len(self.bad_points) < MAX_STEPS:
                self.bad_points.append(point)

    def _begins_run(self, point: Point) -> bool:
        """Return whether a step is the first of another run, because it precedes the steps that were reported."""
        if self._first is None or self._newest is None or not point.is_before(self._newest):
            return False
        if self._has_ended and point.step <= self._newest.step / 2:
            return True
        return not self._first.is_before(point)

    def _begin_run(self) -> None:
        """Reset the statistics at the beginning of another run."""
        self.runs += 1
        self._first, self._has_ended = None, False
        self.points, self.bad_points, self.waiting = [], [], []
        self.first_bad = None
        self.last_grad, self.bad_grads = None, 0
        self.last_overflow, self.overflows, self.at_low_scales, self.good_steps = None, 0, 0, 0

    def steps_after(self, number: int) -> int:
        """Return the number of the last 50 steps that were first reported after line `number`."""
        return len({step for at, step in self.last_steps[-50:] if at > number})

    def continued_after(self, number: int) -> bool:
        """Return whether training continued or began after line `number`; ranks may report one or two steps late."""
        has_begun = any(at <= number for at, _ in self.last_steps)
        return self.steps_after(number) >= (GOOD_STEPS if has_begun else 1)

    def _record_waiting(self, line: LogLine) -> None:
        """Record the step time, and the share of it spent waiting for data, if a line reports them."""
        step_time = _STEP_TIME.search(line.text)
        if step_time:
            self.step_s = float(step_time[1])
        share, seconds = _DATA_SHARE.search(line.text), _DATA_TIME.search(line.text)
        if share:
            self.waiting.append((float(share[1]) / 100, line))
        elif seconds and self.step_s:
            self.waiting.append((float(seconds[1]) / self.step_s, line))

    def anomalies(self) -> list[Anomaly]:
        """Return the anomalies of the newest run, most severe first."""
        candidates = (
            self._find_nan(),
            self._find_overflow(),
            *_find_spike_or_rise(self.points),
            self._find_slow_data(),
        )
        return [anomaly for anomaly in candidates if anomaly]

    def _find_nan(self) -> Anomaly | None:
        if self.first_bad:
            step, loss = self.first_bad.step, self.first_bad.loss
            last_loss = ""
            if self.points:
                last_loss = f"; it was {self.points[-1].loss:.4g} at step {self.points[-1].step}"
            message = f"the loss has been {loss} since step {step}{last_loss}"
            return Anomaly("loss_is_nan", message, self.first_bad.line)
        if self.last_grad and self.bad_grads >= BAD_GRADS:
            message = f"the gradient norm is nan in the last {self.bad_grads} reports, up to step {self.highest}"
            return Anomaly("loss_is_nan", message, self.last_grad)
        return None

    def _find_overflow(self) -> Anomaly | None:
        is_lasting = self.overflows >= MAX_OVERFLOWS or self.at_low_scales >= MAX_AT_LOW_SCALES
        if self.last_overflow is None or not is_lasting or self._has_recovered():
            return None
        scale = "a loss scale that cannot decrease much further" if self.at_low_scales else "every loss scale"
        message = f"the last {self.overflows} steps were skipped because gradients overflow at {scale}"
        return Anomaly("fp16_overflow", message, self.last_overflow)

    def _find_slow_data(self) -> Anomaly | None:
        shares = [share for share, _ in self.waiting]
        if len(shares) < 3 or median(shares[1:]) < MAX_WAITING_SHARE:
            return None
        share, line = max(self.waiting[1:], key=lambda waited: waited[0])
        message = f"{median(shares[1:]):.0%} of the step time (median; maximum {share:.0%}) is spent waiting for data"
        return Anomaly("slow_data", message, line)


def _find_spike_or_rise(points: Sequence[Point]) -> list[Anomaly]:
    """Return the divergence of the loss, or else its largest spike; [] if there is neither, or too few steps."""
    losses = [point.loss or 0.0 for point in points]
    if len(losses) < 2 * MIN_COMPARED:
        return []
    smooth_losses = [median(losses[max(0, i - 2) : i + 3]) for i in range(len(losses))]
    lowest = min(range(len(smooth_losses)), key=smooth_losses.__getitem__)
    last = max(median(losses[-max(5, len(losses) // 10) :]), min(losses[-3:]))
    lowest_loss = smooth_losses[lowest]
    noise = median([abs(b - a) for a, b in zip(losses, losses[1:])])
    has_risen = last > RISEN * lowest_loss and last > lowest_loss + max(RISEN_BY, 6 * noise)
    if has_risen and lowest < len(losses) - 3:
        message = f"the loss fell to {lowest_loss:.4g} at step {points[lowest].step}, and is {last:.4g} "
        message += f"at step {points[-1].step}"
        begin = next((p for p in points[lowest:] if (p.loss or 0.0) > RISEN * lowest_loss), points[-1])
        return [Anomaly("loss_diverged", message, begin.line)]
    spike = _find_spike(points, losses)
    return [spike] if spike else []


def _find_spike(points: Sequence[Point], losses: list[float]) -> Anomaly | None:
    """Return the largest spike in `losses`, the losses of `points`; None if there is none."""
    largest_jump: tuple[float, int] = (0.0, -1)
    for i in range(MIN_COMPARED, len(losses)):
        window = losses[max(0, i - WINDOW) : i]
        window_median = median(window)
        deviation = 1.4826 * median([abs(loss - window_median) for loss in window])
        jump = losses[i] - window_median
        if (
            losses[i] > JUMP * window_median
            and jump > JUMP_BY
            and jump > DEVIATIONS * deviation
            and losses[i] > 1.15 * max(window)
        ):
            largest_jump = max(largest_jump, (jump, i))
    if largest_jump[1] < 0:
        return None
    spike = points[largest_jump[1]]
    message = f"the loss jumped by {largest_jump[0]:.3g} to {spike.loss:.4g} at step {spike.step}"
    return Anomaly("loss_spike", message, spike.line, lasts=False)


def _step_of(text: str) -> int | None:
    """Return the training step that a line reports; None for other lines, and for steps of a validation."""
    lowercase = text.lower()
    if "validation" in lowercase or "eval" in lowercase:
        return None
    if not any(word in lowercase for word in ("iter", "step", "it/s", "s/it", "epoch")):
        return None
    if not any(word in lowercase for word in ("loss", "it/s", "s/it", "|", "elapsed")):
        return None
    for pattern in _STEPS:
        match = pattern.search(text)
        if match:
            return int(match[1])
    return None


def _matched_number(match: re.Match[str] | None) -> float | None:
    """Return the first group of a match as a number; None if there is no match or the group is not a number."""
    try:
        return float(match[1]) if match else None
    except ValueError:
        return None
