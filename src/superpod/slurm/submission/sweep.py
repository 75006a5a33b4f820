"""`recipes submit --sweep PATH=V1,V2`: queues one run per combination of values; either all or none."""

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
"""Maximum number of runs of a sweep; a larger number is probably a mistake, or a task for a tuner."""


@dataclass(frozen=True)
class Axis:
    """A value of the recipe to vary."""

    path: str
    """override path, such as optim.config.lr"""
    values: tuple[str, ...]


def parse_axes(texts: Sequence[str], at_once: int = 0) -> list[Axis]:
    """Return the axes in the arguments of --sweep, PATH=V1,V2,...; commas in brackets or quotes are part of a value.

    `at_once` is the value of --array-limit; 0 = not given.

    Raises:
        UserError: fewer than two values, a repeated value or path, too many combinations, or `at_once` without a sweep.
    """
    if at_once and not texts:
        raise UserError("--array-limit requires --sweep", "leave out --array-limit")
    result: list[Axis] = []
    for text in texts:
        path, equals, rest = text.partition("=")
        values = tuple(value.strip() for value in _split(rest))
        if not equals or not path.strip() or not all(values) or len(values) < 2:
            raise UserError(f"--sweep {text} has fewer than two values", "for example optim.config.lr=1e-4,3e-4")
        if len(set(values)) < len(values):
            raise UserError(f"--sweep {text} repeats a value", "specify each value once")
        if path in [axis.path for axis in result]:
            raise UserError(f"--sweep {path} is specified twice", f"specify all values at once: --sweep {path}=A,B,C")
        result.append(Axis(path.strip(), values))
    sizes = [len(axis.values) for axis in result]
    count = math.prod(sizes)
    if count > MAX_RUNS:
        raise UserError(
            f"the sweep has {count} runs ({' x '.join(map(str, sizes))}), but at most {MAX_RUNS} are allowed",
            "sweep fewer values",
        )
    return result


def _split(text: str) -> list[str]:
    """Return the parts of `text` between commas, except commas inside brackets or quotes."""
    parts, depth, quote, current_part = [], 0, "", ""
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
            parts.append(current_part)
            current_part = ""
            continue
        current_part += sign
    return [*parts, current_part]


def combine(axes: Sequence[Axis]) -> list[tuple[str, ...]]:
    """Return the overrides of each run, as `path=value`; the last axis varies fastest."""
    pairs = [[f"{axis.path}={value}" for value in axis.values] for axis in axes]
    return list(itertools.product(*pairs))


def require_disk_space(submissions: Sequence[Submission], free: int | None) -> None:
    """Check that the checkpoints of all runs of a sweep fit into `free` bytes (None = unknown).

    Raises:
        UserError: there is too little free space.
    """
    need = sum(4 * submission.run.checkpoint_bytes for submission in submissions)
    if free is not None and free < need:
        raise UserError(
            f"{len(submissions)} runs with four checkpoints each need {need / 2**30:,.1f} GiB, but "
            f"only {free / 2**30:,.1f} GiB are free in {submissions[0].folder}",
            "free some space there, or sweep fewer values",
        )


def queue(
    connection: Connection,
    submissions: Sequence[tuple[tuple[str, ...], Submission]],
    attempts: int,
    after: Sequence[str] = (),
    at_once: int = 0,
) -> tuple[str, dict[str, QueuedJobs]]:
    """Create the run folders of a sweep and queue their attempts; return the sweep folder and the jobs by run folder.

    First, one attempt of every run is queued. If sbatch rejects one of these, all jobs are cancelled and all folders
    removed. From then on, every run is consistent, even if this process is killed.

    Args:
        connection: connection to the cluster.
        submissions: the overrides and the submission of each run.
        attempts: number of jobs per run.
        after: dependencies of all jobs.
        at_once: maximum number of concurrent runs; 0 = all.

    Raises:
        UserError: a folder cannot be written, or sbatch rejects a job.
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
    if attempts == 1:
        return sweep, jobs
    for run in made:
        dependencies = [*after, *_throttle_dependency(run, jobs, at_once)]
        if len(dependencies) > len(after):
            # The earlier run now has more jobs than when the first attempt of this run was queued.
            dependency = f"Dependency={','.join(('singleton', *dependencies))}"
            connection.run(["scontrol", "update", f"JobId={jobs[run].ids[0]}", dependency])
        jobs[run] = slurm_submit.queue_more(connection, run, jobs[run], attempts, after=dependencies)
        slurm_submit.record_jobs(connection, run, jobs[run].ids)
    return sweep, jobs


def _throttle_dependency(run: str, jobs: dict[str, QueuedJobs], at_once: int) -> list[str]:
    """Return the dependency of a run on all jobs of the run `at_once` positions before it; [] if there is none."""
    queued_runs = list(jobs)
    position = queued_runs.index(run) if run in jobs else len(queued_runs)
    if not at_once or position < at_once:
        return []
    previous_jobs = jobs[queued_runs[position - at_once]]
    return [f"afterany:{':'.join(previous_jobs.ids)}"]


def _write(
    connection: Connection, sweep: str, submissions: Sequence[tuple[tuple[str, ...], Submission]], made: list[str]
) -> None:
    """Write the file of a sweep, which contains the overrides and the folder of each run, on the cluster."""
    first = submissions[0][1]
    rows = [
        {"overrides": list(overrides), "run": re.sub(rf"^{re.escape(first.folder)}/", "", run)}
        for (overrides, _), run in zip(submissions, made, strict=True)
    ]
    record = {"recipe": first.recipe, "t": time.time(), "members": rows}
    text = json.dumps(record, indent=1).encode() + b"\n"
    folders = first.cluster.folders
    connection.run(["sh", "-c", sharing.WRITE_SWEEP, "sh", sweep, folders.umask, folders.group, FILE], stdin=text)
