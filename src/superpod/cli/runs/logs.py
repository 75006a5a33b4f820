"""`recipes logs`: print the output of a run's ranks."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.options.request_options import Run
from superpod.errors import UserError, readable

if TYPE_CHECKING:
    from superpod.reports.runs.logs import LogReader
    from superpod.runtime.runs.run_folder import RunFolder

READ_S = 1.0
"""Seconds between two checks for new lines with `--follow`."""
FILES_PER_S = 200
"""Maximum number of files to check per second, which matters for `--all` with thousands of ranks."""


def logs(
    run: Run,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Print new lines until the run ends.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", help="Print only this rank. Default: 0, and srun.")] = None,
    all_ranks: Annotated[bool, typer.Option("--all", help="Print all ranks of all nodes.")] = False,
    attempt: Annotated[str, typer.Option("--attempt", help="Print only this attempt. Default: all, in order.")] = "",
    lines: Annotated[int, typer.Option("-n", "--lines", help="Print only the last N lines of each file; 0 = all.")] = 0,
) -> None:
    """Print the output of a run's ranks; exit 1 if there is none."""
    from superpod.reports.runs.logs import LogReader, has_ended
    from superpod.runtime.runs.run_folder import RunFolder
    from superpod.slurm.status.job_queue import POLL_S

    folder = RunFolder.open(run)
    names = [known.name for known in folder.attempts]
    if attempt and attempt.zfill(3) not in names:
        raise UserError(f"{run} has no attempt {attempt}", f"its attempts are: {', '.join(names) or 'none yet'}")
    reader = LogReader(folder, rank=rank, all_ranks=all_ranks, attempt=attempt, tail=lines)
    printed, next_look = _print_new(reader), time.monotonic()
    while follow and not has_ended(folder):
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + POLL_S
            if _is_over(folder):
                break
        time.sleep(max(READ_S, reader.files / FILES_PER_S))
        printed += _print_new(reader)
    printed += _print_new(reader)
    if not printed and reader.is_empty:
        print(f"{run} has no output of these ranks yet; `recipes status {run}` shows its state", file=sys.stderr)
        raise typer.Exit(1)


def _print_new(reader: LogReader) -> int:
    """Print the lines added since the previous call, and return their number."""
    count = 0
    for line in reader.read_new():
        print(readable(line), flush=True)
        count += 1
    return count


def _is_over(folder: RunFolder) -> bool:
    """Return whether a run is done, failed or cancelled, according to its folder and Slurm."""
    from superpod.slurm.status import run_views
    from superpod.slurm.submission import connection

    return run_views.summarize_runs([folder], connection.Connection())[0].state in ("done", "failed", "cancelled")
