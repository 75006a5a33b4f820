"""`recipes cancel`: stop a run for good."""

from __future__ import annotations

from pathlib import Path

from superpod.cli.request_options import Cluster, Run
from superpod.errors import UserError


def cancel(run: Run, cluster: Cluster = "") -> None:
    """Stop a run: end its job, remove its other attempts from the queue, and add no new ones."""
    from superpod.node import guard
    from superpod.node.run_folder import RunFolder
    from superpod.slurm import connection, profiles
    from superpod.slurm.submit import job_name

    slurm = connection.of(profiles.load(cluster)) if cluster else connection.Connection()
    if slurm.remote:
        slurm.run(["sh", "-c", 'cat >"$0/stop"', run], stdin=b'{"reason": "cancelled by the user", "by": "user"}')
    else:
        folder = RunFolder.open(run)
        if folder.done:
            raise UserError(f"{run} is done", "there is nothing to cancel")
        guard.stop(folder, "cancelled by the user", by=guard.StoppedBy.USER)
    slurm.run(["scancel", f"--name={job_name(str(Path(run).absolute()))}"])
    print(f"cancelled {run}")
