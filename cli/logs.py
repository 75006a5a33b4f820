"""`recipes logs`: what the ranks of a run have printed."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from superpod.cli.request_options import Run


def logs(
    run: Run,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run ends.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", help="Of this rank; default: rank 0, and what failed.")] = None,
    all_ranks: Annotated[bool, typer.Option("--all", help="Of every rank on every node.")] = False,
    attempt: Annotated[str, typer.Option("--attempt", help="Of this attempt; default: all of them, in order.")] = "",
    lines: Annotated[int, typer.Option("-n", "--lines", help="The last lines of each file; 0 = all.")] = 0,
) -> None:
    """Print what the ranks of a run have said, over all nodes and all attempts."""
    from superpod.lifecycle.logs import Reader
    from superpod.node.run_folder import RunFolder
    from superpod.slurm import connection, watch

    folder = RunFolder.open(run)
    reader = Reader(folder, rank=rank, all_ranks=all_ranks, attempt=attempt, tail=lines)
    slurm = connection.Connection()
    while True:
        for line in reader.new():
            print(line)
        ended = watch.of_folder([folder], slurm)[0].state in ("done", "failed", "cancelled")
        if not follow or ended:
            break
        time.sleep(1)
    for line in reader.new():
        print(line)
