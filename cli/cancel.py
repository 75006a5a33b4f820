"""`recipes cancel`: stop a run for good."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from superpod.cli.request_options import Cluster, Run
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.node.run_folder import RunFolder
    from superpod.slurm.connection import Connection

_REMOTE = r"""
[ -O "$1" ] || { echo "$1 belongs to $(stat -c %U "$1"), and you are $(id -un): only its owner may cancel it"; exit 1; }
[ ! -e "$1/done" ] || { echo "$1 is done: there is nothing to cancel"; exit 1; }
printf '%s' '{"reason": "cancelled by the user", "by": "user"}' >"$1/stop"
"""


def cancel(run: Run, cluster: Cluster = "") -> None:
    """Stop a run, or every run of a sweep: end its job, remove its other attempts from the queue, add no new ones."""
    from superpod.lifecycle import sweep
    from superpod.slurm import connection, profiles

    slurm = connection.of(profiles.load(cluster)) if cluster else connection.Connection()
    if slurm.remote or not sweep.is_sweep(Path(run)):
        _cancel(run, slurm)
        return
    for _, path in sweep.runs_of(Path(run)):
        try:
            _cancel(str(path), slurm)
        except UserError as error:  # done already, or gone: the others still are to be cancelled
            print(error)


def _cancel(run: str, slurm: Connection) -> None:
    from superpod.node.run_folder import RunFolder
    from superpod.slurm.submit import job_name

    if slurm.remote:
        slurm.shell(_REMOTE, run)
    else:
        _stop(RunFolder.open(run))
    slurm.run(["scancel", f"--name={job_name(str(Path(run).absolute()))}"])
    print(f"cancelled {run}")


def _stop(folder: RunFolder) -> None:
    """Leave the mark that no further attempt starts.

    Raises:
        UserError: the run is another user's, done, of this machine, or its folder cannot be written.
    """
    from superpod.node import guard, owner
    from superpod.slurm import watch

    owner.refuse_others(folder.path, "cancel it")
    if folder.done:
        raise UserError(f"{folder.path} is done", "there is nothing to cancel")
    if watch.is_local(folder):
        raise UserError(f"{folder.path} runs without Slurm", "press Ctrl-C where it runs: it saves first")
    guard.stop(folder, "cancelled by the user", by=guard.StoppedBy.USER)
    if guard.stopped(folder) is None:
        raise UserError(f"{folder.path / guard.STOP} cannot be written", "make room there, then cancel it once more")
