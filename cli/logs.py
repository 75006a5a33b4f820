"""`recipes logs`: the output of a run's ranks."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from superpod.cli.request_options import Run
from superpod.errors import UserError


def logs(
    run: Run,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Keep printing until the run ends.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", help="Only this rank; default: 0, and why srun failed.")] = None,
    all_ranks: Annotated[bool, typer.Option("--all", help="All ranks of all nodes.")] = False,
    attempt: Annotated[str, typer.Option("--attempt", help="Only this attempt; default: all of them, in order.")] = "",
    lines: Annotated[int, typer.Option("-n", "--lines", help="Only the last N lines of each file; 0 = all.")] = 0,
) -> None:
    """Print the output of a run's ranks, over all nodes and attempts."""
    from superpod.lifecycle.logs import Reader
    from superpod.node.run_folder import RunFolder
    from superpod.slurm import connection, watch

    folder = RunFolder.open(run)
    names = [known.name for known in folder.attempts]
    if attempt and attempt.zfill(3) not in names:
        raise UserError(f"{run} has no attempt {attempt}", f"it has {', '.join(names) or 'none yet'}")
    reader = Reader(folder, rank=rank, all_ranks=all_ranks, attempt=attempt, tail=lines)
    slurm = connection.Connection()
    while True:
        for line in reader.new():
            print(line)
        ended = watch.views([folder], slurm)[0].state in ("done", "failed", "cancelled")
        if not follow or ended:
            break
        time.sleep(1)
    for line in reader.new():
        print(line)
