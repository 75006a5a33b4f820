"""Whether the attempts of a run bring it forward, in steps and in time. Standard library only.

A job that starts for an hour, makes one step, saves it and dies has made a step, and a run of such jobs never ends.
What counts is the share of an attempt's time from its first to its last step which a checkpoint holds, saves and
validations among them included.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from superpod.common.files import JsonObject, is_number, number_or_none
from superpod.common.units import duration
from superpod.runtime.attempts import time_limit
from superpod.runtime.runs.run_facts import read_metrics
from superpod.runtime.runs.run_folder import Attempt, RunFolder

LEAST_STEPS = 5
"""Steps of an attempt after which its pace is judged."""

LEAST_SHARE = 0.1
"""Share of an attempt's time in steps that count, below which it has brought the run nowhere."""

LEAST_S = 600.0
"""Seconds that attempts of such a share take together before they are judged by it: starts alone take minutes."""


@dataclass(frozen=True)
class Worth:
    """What an attempt has brought: steps that a checkpoint holds, the seconds from first to last, and its own."""

    steps: int
    useful_s: float | None
    took_s: float | None

    @property
    def is_idle(self) -> bool:
        """Whether it got nowhere: no step that is kept, or next to no time in such steps."""
        if self.steps <= 0:
            return True
        return bool(self.useful_s and self.took_s and self.useful_s < LEAST_SHARE * self.took_s)


def idle_streak(worths: Sequence[Worth]) -> list[Worth]:
    """The last attempts in a row that got nowhere, newest first.

    Those whose steps a checkpoint holds count once they have taken LEAST_S together: of a job that is stopped two
    minutes after its start, time says nothing yet.
    """
    idle = list(itertools.takewhile(lambda worth: worth.is_idle, reversed(worths)))
    if sum(worth.took_s or 0.0 for worth in idle if worth.steps > 0) >= LEAST_S:
        return idle
    return list(itertools.takewhile(lambda worth: worth.steps <= 0, idle))


def measure_attempts(run: RunFolder, attempts: Sequence[Attempt], newest: int) -> list[Worth]:
    """What each of the attempts has brought, in their order; `newest` is the step of the newest checkpoint."""
    lines = read_metrics(run.path)
    befores = [number_or_none(attempt.result.get("before")) or 0.0 for attempt in attempts]
    ends = [*befores[1:], newest]
    return [_worth(attempt, lines, int(before), int(end)) for attempt, before, end in zip(attempts, befores, ends)]


def _worth(attempt: Attempt, lines: list[JsonObject], before: int, end: int) -> Worth:
    own = [line for line in lines if line.get("attempt") == attempt.name and line["step"] > before]
    started, ended = attempt.result.get("started"), attempt.result.get("ended")
    took = ended - started if is_number(ended) and is_number(started) else None
    return Worth(end - before, _useful_s(own, end), took)


def _useful_s(lines: list[JsonObject], end: int) -> float | None:
    """Seconds from the begin of the first of these steps to the end of the save of step `end`; None without a time.

    The save is over when the next step begins; where none has followed, nothing tells how long it took. A step that
    was followed by a validation has a second line, of a later time.
    """
    timed = [line for line in lines if is_number(line.get("step_time_s"))]
    kept = [line for line in timed if line["step"] <= end]
    if not kept:
        return None
    after = [line for line in timed if line["step"] > end]
    first, last = _began(kept[0]), _began(after[0]) if after else _time_of(kept[-1])
    steps = sum({line["step"]: float(line["step_time_s"]) for line in kept}.values())
    return max(steps, last - first)  # the clock may have been set back


def _began(line: JsonObject) -> float:
    return _time_of(line) - float(line["step_time_s"])


def _time_of(line: JsonObject) -> float:
    return number_or_none(line.get("t")) or 0.0


def describe_idle(idle: Sequence[Worth]) -> str:
    """What attempts that got nowhere have in common."""
    steps = sum(max(0, worth.steps) for worth in idle)
    if not steps:
        return f"{len(idle)} attempts in a row made no new checkpoint"
    useful, took = (sum(getattr(w, name) or 0 for w in idle) for name in ("useful_s", "took_s"))
    return (
        f"{len(idle)} attempts in a row brought {steps} step{'s' * (steps > 1)} in {duration(took)}, and the steps "
        f"that a checkpoint holds took {duration(useful)} of these: less than {LEAST_SHARE:.0%}"
    )


@dataclass(frozen=True)
class Chain:
    """The jobs that wait for a run: how many, the seconds of their limit, and those in each that make no steps."""

    jobs: int
    limit_s: float
    lost_s: float
    running_s: float = 0.0
    """seconds that the running job has left for steps"""


def chain_shortfall(step: int, max_steps: int, step_s: float, chain: Chain) -> str:
    """That the jobs of a chain end before the run does, with what is missing; '' when they suffice."""
    left, usable = max_steps - step, chain.limit_s - chain.lost_s
    if left <= 0 or step_s <= 0:
        return ""
    per_job = int(usable / step_s) if usable > 0 else 0
    if per_job < 1:
        return (
            f"a job of {duration(chain.limit_s)} makes no step: starting and saving take {duration(chain.lost_s)}, "
            f"a step {duration(step_s)}"
        )
    here = max(0, int(chain.running_s / step_s))
    if here + per_job * chain.jobs >= left:
        return ""
    last, jobs = step + here + per_job * chain.jobs, f"{chain.jobs} job{'s' * (chain.jobs != 1)}"
    jobs = f"this job and {jobs} more" if chain.running_s else jobs
    return (
        f"{left:,} steps of {step_s:.3g} s take {duration(left * step_s)}, and {jobs} of {duration(chain.limit_s)} end "
        f"at step {last:,} of {max_steps:,}: {math.ceil((left - here) / per_job)} are needed"
    )


def alarm(run: RunFolder, lines: Sequence[JsonObject], waiting: int, now: float) -> str:
    """That the jobs of a running run end before it does, at the pace of its last steps; '' where nobody can tell yet.

    `lines` are its newest metrics, `waiting` its jobs in the queue. The limit is the one that the run was submitted
    with, and that of the running job what its first node has last read.
    """
    attempts = run.attempts
    own = [line for line in lines if attempts and line.get("attempt") == attempts[-1].name]
    limit_s, save_s, most = (number_or_none(run.facts.get(name)) or 0.0 for name in ("limit_s", "save_s", "max_steps"))
    step_s = steady_step_s(own)
    if not (limit_s and most and step_s) or len(own) < LEAST_STEPS:
        return ""
    started = number_or_none(attempts[-1].result.get("started")) or 0.0
    start_s = _time_of(own[0]) - (number_or_none(own[0].get("step_time_s")) or 0.0) - started
    ends = time_limit.read(attempts[-1].path) or started + limit_s
    chain = Chain(waiting, limit_s, max(start_s, 0.0) + save_s, max(0.0, ends - save_s - now))
    return chain_shortfall(own[-1]["step"], int(most), step_s, chain)


def steady_step_s(lines: Sequence[JsonObject]) -> float | None:
    """Seconds of a step as it is now: the median of the last 20, so that a save in between does not count."""
    seconds = [float(line["step_time_s"]) for line in lines[-20:] if is_number(line.get("step_time_s"))]
    return statistics.median(seconds) if seconds else None
