"""Measure the progress of a run's attempts, in steps and in time. Standard library only.

A job that takes an hour to start, trains and saves one step and then fails makes progress in steps, but a run of such
jobs never ends. Therefore productive time is measured too: from the first step of an attempt to its last step that is
in a checkpoint, including the saves and validations in between.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from superpod.common.json_files import JsonObject, is_number, number_or_none
from superpod.common.units import duration
from superpod.runtime.attempts import time_limit
from superpod.runtime.runs.run_facts import read_metrics
from superpod.runtime.runs.run_folder import Attempt, RunFolder

MIN_STEPS = 5
"""Minimum number of steps of the running attempt for `alarm` to use its step time."""

MIN_SHARE = 0.1
"""Minimum share of productive time in an attempt; below it, the attempt counts as idle."""

MIN_S = 600.0
"""Minimum total seconds of attempts for their share to count, since the start alone takes minutes."""


@dataclass(frozen=True)
class AttemptProgress:
    """The progress of an attempt."""

    steps: int
    """number of new steps that are in a checkpoint"""
    productive_s: float | None
    """seconds from the first to the last of these steps; None = unknown"""
    total_s: float | None
    """seconds of the entire attempt; None = unknown"""

    @property
    def is_idle(self) -> bool:
        """Whether no new step is in a checkpoint, or the share of productive time is below MIN_SHARE."""
        if self.steps <= 0:
            return True
        return bool(self.productive_s and self.total_s and self.productive_s < MIN_SHARE * self.total_s)


def idle_streak(attempts: Sequence[AttemptProgress]) -> list[AttemptProgress]:
    """Return the consecutive idle attempts at the end of `attempts`, newest first.

    Idle attempts with new steps count only if they took at least MIN_S seconds in total: the share of productive time
    says nothing about a job that is stopped two minutes after its start.
    """
    idle_attempts = list(itertools.takewhile(lambda attempt: attempt.is_idle, reversed(attempts)))
    if sum(attempt.total_s or 0.0 for attempt in idle_attempts if attempt.steps > 0) >= MIN_S:
        return idle_attempts
    return list(itertools.takewhile(lambda attempt: attempt.steps <= 0, idle_attempts))


def measure_attempts(run: RunFolder, attempts: Sequence[Attempt], newest_step: int) -> list[AttemptProgress]:
    """Return the progress of each attempt, in order; `newest_step` is the step of the run's newest checkpoint."""
    lines = read_metrics(run.path)
    starts = [int(number_or_none(attempt.result.get("before")) or 0) for attempt in attempts]
    ends = [*starts[1:], newest_step]
    return [_measure(attempt, lines, start, end) for attempt, start, end in zip(attempts, starts, ends)]


def _measure(attempt: Attempt, lines: list[JsonObject], start: int, end: int) -> AttemptProgress:
    """Return the progress of an attempt that started at checkpoint step `start` and saved step `end` last."""
    own_lines = [line for line in lines if line.get("attempt") == attempt.name and line["step"] > start]
    started, ended = attempt.result.get("started"), attempt.result.get("ended")
    total_s = ended - started if is_number(ended) and is_number(started) else None
    return AttemptProgress(end - start, _productive_s(own_lines, end), total_s)


def _productive_s(lines: list[JsonObject], end: int) -> float | None:
    """Return the seconds from the start of the first step to the end of the save of step `end`; None if unknown.

    The save ends when the next step begins; without a next step, its duration counts as 0. A step followed by a
    validation has a second line with a later time.
    """
    timed_lines = [line for line in lines if is_number(line.get("step_time_s"))]
    kept_lines = [line for line in timed_lines if line["step"] <= end]
    if not kept_lines:
        return None
    lost_lines = [line for line in timed_lines if line["step"] > end]
    end_time = _step_start(lost_lines[0]) if lost_lines else _time_of(kept_lines[-1])
    steps_s = sum({line["step"]: float(line["step_time_s"]) for line in kept_lines}.values())
    return max(steps_s, end_time - _step_start(kept_lines[0]))  # the clock may have been set back


def _step_start(line: JsonObject) -> float:
    return _time_of(line) - float(line["step_time_s"])


def _time_of(line: JsonObject) -> float:
    return number_or_none(line.get("t")) or 0.0


def describe_idle(idle: Sequence[AttemptProgress]) -> str:
    """Return a sentence about consecutive idle attempts: the number of new steps and the share of productive time."""
    steps = sum(max(0, attempt.steps) for attempt in idle)
    if not steps:
        return f"{len(idle)} consecutive attempts wrote no new checkpoint"
    productive_s = sum(attempt.productive_s or 0 for attempt in idle)
    total_s = sum(attempt.total_s or 0 for attempt in idle)
    steps_text = "1 step" if steps == 1 else f"{steps} steps"
    return (
        f"{len(idle)} consecutive attempts trained {steps_text} in {duration(total_s)}, but only "
        f"{duration(productive_s)} of that time was spent on steps that a checkpoint contains: less than "
        f"{MIN_SHARE:.0%}"
    )


@dataclass(frozen=True)
class Chain:
    """The queued jobs of a run."""

    jobs: int
    limit_s: float
    """time limit per job, seconds"""
    lost_s: float
    """seconds per job for starting and saving"""
    running_s: float = 0.0
    """seconds for steps that remain in the running job"""


def chain_shortfall(step: int, max_steps: int, step_s: float, chain: Chain) -> str:
    """Return a message if the jobs of a chain end before the run, at `step` now, reaches `max_steps`; '' if not.

    `step_s` is the step time in seconds.
    """
    left, usable_s = max_steps - step, chain.limit_s - chain.lost_s
    if left <= 0 or step_s <= 0:
        return ""
    per_job = int(usable_s / step_s)
    if per_job < 1:
        return (
            f"a job of {duration(chain.limit_s)} cannot complete a step: starting and saving take "
            f"{duration(chain.lost_s)}, and a step takes {duration(step_s)}"
        )
    steps_here = max(0, int(chain.running_s / step_s))
    if steps_here + per_job * chain.jobs >= left:
        return ""
    last = step + steps_here + per_job * chain.jobs
    jobs = "1 job" if chain.jobs == 1 else f"{chain.jobs} jobs"
    if chain.running_s:
        jobs = f"this job and {jobs} more"
    return (
        f"{left:,} steps of {step_s:.3g} s take {duration(left * step_s)}, but {jobs} of {duration(chain.limit_s)} end "
        f"at step {last:,} of {max_steps:,}: {math.ceil((left - steps_here) / per_job)} are needed"
    )


def alarm(run: RunFolder, lines: Sequence[JsonObject], pending_jobs: int, now: float) -> str:
    """Return a message if the jobs of a running run end before it is done, at its current step time; '' if not.

    `lines` are the newest metrics of the run, `pending_jobs` is the number of its pending jobs, which have the time
    limit of the submission, and `now` is the Unix time. The running job has the limit that its first node read.
    """
    attempts = run.attempts
    own_lines = [line for line in lines if attempts and line.get("attempt") == attempts[-1].name]
    limit_s, save_s, max_steps = (
        number_or_none(run.facts.get(name)) or 0.0 for name in ("limit_s", "save_s", "max_steps")
    )
    step_s = steady_step_s(own_lines)
    if not (limit_s and max_steps and step_s) or len(own_lines) < MIN_STEPS:
        return ""
    start_time = number_or_none(attempts[-1].result.get("started")) or 0.0
    start_s = _time_of(own_lines[0]) - (number_or_none(own_lines[0].get("step_time_s")) or 0.0) - start_time
    ends = time_limit.read(attempts[-1].path) or start_time + limit_s
    chain = Chain(pending_jobs, limit_s, max(start_s, 0.0) + save_s, max(0.0, ends - save_s - now))
    return chain_shortfall(own_lines[-1]["step"], int(max_steps), step_s, chain)


def steady_step_s(lines: Sequence[JsonObject]) -> float | None:
    """Return the current step time in seconds: the median of the last 20 steps, without saves; None if unknown."""
    seconds = [float(line["step_time_s"]) for line in lines[-20:] if is_number(line.get("step_time_s"))]
    return statistics.median(seconds) if seconds else None
