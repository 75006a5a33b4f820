"""`recipes submit --sweep PATH=V1,V2`: every combination of values as a run of its own, all queued or none."""

from __future__ import annotations

import itertools
import json
import math
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from superpod.errors import UserError
from superpod.reports.sweep import FILE, FOLDER
from superpod.slurm.profiles import sharing
from superpod.slurm.submission import submit as slurm_submit

if TYPE_CHECKING:
    from superpod.slurm.submission.connection import Connection
    from superpod.slurm.submission.submit import QueuedJobs, Submission

MAX_RUNS = 256
"""Runs of a sweep; more is a typing mistake, or a matter for a tuner."""


@dataclass(frozen=True)
class Axis:
    """A field and the values that it takes."""

    path: str
    values: tuple[str, ...]


def parse_axes(texts: Sequence[str], at_once: int = 0) -> list[Axis]:
    """What `--sweep` names, each as PATH=V1,V2,...; a comma inside brackets or quotes belongs to its value.

    Raises:
        UserError: no values, one value only, a value or a path twice, too many combinations, or `at_once` of nothing.
    """
    if at_once and not texts:
        raise UserError("--array-limit is of a sweep, and there is no --sweep", "leave it out")
    result: list[Axis] = []
    for text in texts:
        path, equals, rest = text.partition("=")
        values = tuple(value.strip() for value in _split(rest))
        if not equals or not path.strip() or not all(values) or len(values) < 2:
            raise UserError(f"--sweep {text}: it takes two values or more", "such as --sweep optim.config.lr=1e-4,3e-4")
        if len(set(values)) < len(values):
            raise UserError(f"--sweep {text}: a value stands there twice", "name each value once")
        if path in [axis.path for axis in result]:
            raise UserError(f"--sweep {path} is given twice", f"write all its values into one: --sweep {path}=A,B,C")
        result.append(Axis(path.strip(), values))
    count = math.prod(len(axis.values) for axis in result)
    if count > MAX_RUNS:
        raise UserError(
            f"the sweep has {count} runs ({_sizes(result)}), and {MAX_RUNS} are allowed", "sweep fewer values"
        )
    return result


def _sizes(swept: list[Axis]) -> str:
    return " x ".join(str(len(axis.values)) for axis in swept)


def _split(text: str) -> list[str]:
    """`text` at its commas, except those inside brackets or quotes."""
    parts, depth, quote, current = [], 0, "", ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        elif sign == "," and depth == 0:
            parts.append(current)
            current = ""
            continue
        current += sign
    return [*parts, current]


def combine(swept: Sequence[Axis]) -> list[tuple[str, ...]]:
    """The overrides of each run, `path=value`: the last axis changes first."""
    pairs = [[f"{axis.path}={value}" for value in axis.values] for axis in swept]
    return list(itertools.product(*pairs))


def require_disk_space(submissions: Sequence[Submission], free: int | None) -> None:
    """Refuse a sweep whose runs together do not fit the disk; preflight has looked at each alone.

    Raises:
        UserError: with the bytes that all checkpoints need, and those that are free.
    """
    need = sum(4 * submission.run.checkpoint_bytes for submission in submissions)
    if free is not None and free < need:
        raise UserError(
            f"four checkpoints of each of {len(submissions)} runs need {need / 2**30:,.1f} GiB, but "
            f"{free / 2**30:,.1f} are free under {submissions[0].folder}",
            "make room there, or sweep fewer values",
        )


def queue(
    connection: Connection,
    submissions: Sequence[tuple[tuple[str, ...], Submission]],
    attempts: int,
    after: Sequence[str] = (),
    at_once: int = 0,
) -> tuple[str, dict[str, QueuedJobs]]:
    """Make the run folders and queue their attempts; returns the sweep's folder, and the jobs of each run.

    No more than `at_once` runs have jobs that may start, 0 = all of them: the others wait for the jobs of those before.

    The first attempts of all runs are queued before the second of any, and where sbatch refuses one of these, all that
    was queued is cancelled and every folder removed. From then on each run is whole, whatever ends this.

    Raises:
        UserError: a folder cannot be written, or sbatch refuses.
    """
    runs_folder = submissions[0][1].folder
    sweep = f"{runs_folder}/{FOLDER}/{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}"
    jobs: dict[str, QueuedJobs] = {}
    made: list[str] = []
    try:
        for _, submission in submissions:
            made.append(slurm_submit.new_run(submission, connection))
        _write(connection, sweep, submissions, made)
        for run in made:
            jobs[run] = slurm_submit.queue(
                connection, run, 1, after=[*after, *_throttle_dependency(run, jobs, at_once)]
            )
        for run in made:
            slurm_submit.record_jobs(connection, run, jobs[run].ids)
    except BaseException:
        slurm_submit.discard(connection, made)
        connection.run(["rm", "-rf", "--", sweep])
        raise
    for run in made if attempts > 1 else []:
        waits = [*after, *_throttle_dependency(run, jobs, at_once)]
        if len(waits) > len(after):  # on further attempts too, which were not queued when the first one was
            dependency = f"Dependency={','.join(('singleton', *waits))}"
            connection.run(["scontrol", "update", f"JobId={jobs[run].ids[0]}", dependency])
        jobs[run] = slurm_submit.queue_more(connection, run, jobs[run], attempts, after=waits)
        slurm_submit.record_jobs(connection, run, jobs[run].ids)
    return sweep, jobs


def _throttle_dependency(run: str, jobs: dict[str, QueuedJobs], at_once: int) -> list[str]:
    """What a run waits for, so that no more than `at_once` have jobs that may start: the run so many before it."""
    queued = list(jobs)
    place = queued.index(run) if run in jobs else len(queued)
    return [f"afterany:{':'.join(jobs[queued[place - at_once]].ids)}"] if at_once and place >= at_once else []


def _write(
    connection: Connection, sweep: str, submissions: Sequence[tuple[tuple[str, ...], Submission]], made: list[str]
) -> None:
    first = submissions[0][1]
    rows = [
        {"overrides": list(overrides), "run": re.sub(rf"^{re.escape(first.folder)}/", "", run)}
        for (overrides, _), run in zip(submissions, made, strict=True)
    ]
    record = {"recipe": first.recipe, "t": time.time(), "members": rows}
    text = json.dumps(record, indent=1).encode() + b"\n"
    rights = first.cluster.folders
    connection.run(["sh", "-c", sharing.SWEEP, "sh", sweep, rights.umask, rights.group, FILE], stdin=text)
