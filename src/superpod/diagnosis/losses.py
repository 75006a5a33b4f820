"""Detect abnormal values in the step reports of a log: NaN, spikes and divergence of the loss, and slow data.

Reads the formats of Megatron-LM, NeMo, Lightning, Hugging Face, torchtitan and DeepSpeed. Standard library only.
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
"""Lines of DeepSpeed, Apex or fairseq when a step is skipped and the loss scale is lowered if possible."""
MAX_OVERFLOWS, MAX_AT_LOW_SCALES, LOW_SCALE = 5, 2, 128
"""Numbers of consecutive overflows that indicate failed training: in total, and at scales below LOW_SCALE."""
USUAL_SCALE = 1 << 16
"""Overflows at larger scales are part of the initial search for a loss scale."""
_SKIPPED = re.compile(r"\bstep=(\d+), skipped=(\d+)\b")
"""DeepSpeed's counts of steps and skipped steps."""
GOOD_STEPS = 3
"""Number of steps after an overflow or error after which training counts as recovered."""
BAD_GRADS = 2
"""Number of consecutive NaN gradient norms that are reported."""

WINDOW = 20
MIN_COMPARED = 8
"""Number of losses that a spike is compared with, and the minimum number."""
JUMP, JUMP_BY, DEVIATIONS = 1.35, 0.25, 8.0
"""A spike exceeds the median of WINDOW losses by this factor, by this difference, and by this many deviations."""
RISEN, RISEN_BY = 1.2, 0.3
"""The loss has diverged if the last losses exceed the lowest by this factor and by this difference in nats."""
MAX_WAITING_SHARE = 0.3
"""Share of the step time spent waiting for data that is reported."""
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
    def place(self) -> tuple[float, int]:
        """Position in the training. A fractional epoch is sufficient; otherwise steps may be counted within the
        epoch.
        """
        epoch = self.epoch or 0.0
        return epoch, self.step if epoch.is_integer() else 0

    def is_behind(self, other: Point) -> bool:
        """Return whether this point is earlier in the training than `other`, as reported by the same rank."""
        if self.line.rank != other.line.rank or (self.epoch is None) != (other.epoch is None):
            return False
        return self.place < other.place


@dataclass(frozen=True)
class Anomaly:
    """An anomaly: the name of its cause, a message, and the line."""

    cause: str
    message: str
    line: LogLine
    lasts: bool = True
    """False if the training recovered by itself"""


@dataclass
class Series:
    """The steps of one log."""

    points: list[Point] = field(default_factory=list)
    bad_points: list[Point] = field(default_factory=list)
    """steps with a non-finite loss"""
    first_bad: Point | None = None
    bad: int = 0
    """number of consecutive non-finite losses, up to the last step"""
    bad_grads: int = 0
    last_bad_grad: LogLine | None = None
    overflows: int = 0
    at_low_scales: int = 0
    """numbers of consecutive steps skipped for an overflow, up to the last step: in total, and at low scales"""
    last_overflow: LogLine | None = None
    good_steps: int = 0
    """steps that were not skipped, in DeepSpeed's newest report"""
    waiting: list[tuple[float, LogLine]] = field(default_factory=list)
    """share of each step time spent waiting for data"""
    step_s: float = 0.0
    last_steps: list[tuple[int, int]] = field(default_factory=list)
    """(line number, step) for the first report of each step"""
    highest: int = -1
    runs: int = 0
    """number of runs that began in the log after the first run"""
    _first: Point | None = None
    """the first loss of the newest run"""
    _newest: Point | None = None
    _has_ended: bool = False
    """whether the newest run has ended"""

    def end(self) -> None:
        """Record the end of training."""
        self._has_ended = True

    def add_line(self, line: LogLine) -> bool:
        """Process a line; return whether it reports a step."""
        self._record_waiting(line)
        overflow = _OVERFLOW.search(line.text)
        if overflow:
            scale = float(overflow[2].rstrip("."))
            if not overflow[1] or scale < USUAL_SCALE:
                self._record_overflow(line, is_low=bool(overflow[1]) and scale < LOW_SCALE)
            return True

        skipped_match = _SKIPPED.search(line.text)
        if skipped_match:
            self._record_good_steps(int(skipped_match[1]) - int(skipped_match[2]))
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
            self.last_bad_grad = line
        return True

    def _record_overflow(self, line: LogLine, is_low: bool) -> None:
        if self._has_recovered():
            self.overflows = self.at_low_scales = 0
        self.overflows += 1
        self.at_low_scales += is_low
        self.last_overflow = line

    def _record_good_steps(self, good: int) -> None:
        if good - self.good_steps >= GOOD_STEPS:
            self.overflows = self.at_low_scales = 0
        self.good_steps = good

    def _has_recovered(self) -> bool:
        """Return whether GOOD_STEPS steps followed the newest overflow."""
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
            self.bad, self.first_bad = 0, None
            self.points.append(point)
            if len(self.points) > MAX_STEPS:
                del self.points[::2]
        else:
            self.first_bad = self.first_bad or point
            self.bad += 1
            if len(self.bad_points) < MAX_STEPS:
                self.bad_points.append(point)

    def _begins_run(self, point: Point) -> bool:
        """Return whether a step belongs to another run in the same log, that is, training has started again."""
        if self._first is None or self._newest is None or not point.is_behind(self._newest):
            return False
        if self._has_ended and point.step <= self._newest.step / 2:
            return True
        return not self._first.is_behind(point)

    def _begin_run(self) -> None:
        """Reset the statistics at the beginning of another run."""
        self.runs += 1
        self._first, self._has_ended = None, False
        self.points, self.bad_points, self.waiting = [], [], []
        self.first_bad, self.bad = None, 0
        self.last_bad_grad, self.bad_grads = None, 0
        self.last_overflow, self.overflows, self.at_low_scales, self.good_steps = None, 0, 0, 0

    def steps_after(self, number: int) -> int:
        """Return the number of steps that were first reported after a line."""
        return len({step for at, step in self.last_steps[-50:] if at > number})

    def continued_after(self, number: int) -> bool:
        """Return whether training continued or began after a line; ranks may report one or two steps late."""
        has_begun = any(at <= number for at, _ in self.last_steps)
        needed_steps = GOOD_STEPS if has_begun else 1
        return self.steps_after(number) >= needed_steps

    def _record_waiting(self, line: LogLine) -> None:
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
        if self.first_bad and self.bad >= 1:
            step, loss = self.first_bad.step, self.first_bad.loss
            last_loss = ""
            if self.points:
                last_loss = f"; it was {self.points[-1].loss:.4g} at step {self.points[-1].step}"
            message = f"the loss is {loss} since step {step}{last_loss}"
            return Anomaly("loss_is_nan", message, self.first_bad.line)
        if self.last_bad_grad and self.bad_grads >= BAD_GRADS:
            message = f"the gradient norm is nan in {self.bad_grads} consecutive reports, up to step {self.highest}"
            return Anomaly("loss_is_nan", message, self.last_bad_grad)
        return None

    def _find_overflow(self) -> Anomaly | None:
        is_lasting = self.overflows >= MAX_OVERFLOWS or self.at_low_scales >= MAX_AT_LOW_SCALES
        if self.last_overflow is None or not is_lasting or self._has_recovered():
            return None
        scale_text = (
            "at a loss scale that cannot decrease much further" if self.at_low_scales else "at every loss scale"
        )
        message = f"the last {self.overflows} steps were skipped because gradients overflow {scale_text}"
        return Anomaly("fp16_overflow", message, self.last_overflow)

    def _find_slow_data(self) -> Anomaly | None:
        shares = [share for share, _ in self.waiting]
        if len(shares) < 3 or median(shares[1:]) < MAX_WAITING_SHARE:
            return None
        share, line = max(self.waiting[1:], key=lambda waited: waited[0])
        message = f"{median(shares[1:]):.0%} of the step time is spent waiting for data, at most {share:.0%}"
        return Anomaly("slow_data", message, line)


def _find_spike_or_rise(points: Sequence[Point]) -> list[Anomaly]:
    """Find a loss that has diverged, or else a spike over a few steps; the first steps are excluded."""
    losses = [point.loss or 0.0 for point in points]
    if len(losses) < 2 * MIN_COMPARED:
        return []
    smooth_losses = [median(losses[max(0, i - 2) : i + 3]) for i in range(len(losses))]
    lowest = min(range(len(smooth_losses)), key=smooth_losses.__getitem__)
    last = max(median(losses[-max(5, len(losses) // 10) :]), min(losses[-3:]))
    rises = (
        lowest < len(losses) - 3 and last > RISEN * smooth_losses[lowest] and last > smooth_losses[lowest] + RISEN_BY
    )
    spike = _find_spike(points, losses)
    noise = median([abs(b - a) for a, b in zip(losses, losses[1:])])
    if rises and last > smooth_losses[lowest] + 6 * noise:
        fell_text = f"the loss fell to {smooth_losses[lowest]:.4g} at step {points[lowest].step}"
        message = f"{fell_text}, and is {last:.4g} at step {points[-1].step}"
        begin = next((p for p in points[lowest:] if (p.loss or 0.0) > RISEN * smooth_losses[lowest]), points[-1])
        return [Anomaly("loss_diverged", message, begin.line)]
    return [spike] if spike else []


def _find_spike(points: Sequence[Point], losses: list[float]) -> Anomaly | None:
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
    lowercase = text.lower()
    if "validation" in lowercase or "eval" in lowercase:
        return None
    if not any(word in lowercase for word in ("iter", "step", "it/s", "s/it", "epoch")):
        return None
    has_numbers = (
        "loss" in lowercase or "it/s" in lowercase or "s/it" in lowercase or "|" in lowercase or "elapsed" in lowercase
    )
    if not has_numbers:
        return None
    for pattern in _STEPS:
        match = pattern.search(text)
        if match:
            return int(match[1])
    return None


def _matched_number(match: re.Match[str] | None) -> float | None:
    if match is None:
        return None
    try:
        return float(match[1])
    except ValueError:
        return None
