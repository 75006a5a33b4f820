"""`recipes cancel`: stop a run for good."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.cli.options.request_options import Cluster, Run
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.runtime.runs.run_folder import RunFolder
    from superpod.slurm.submission.connection import Connection

_REMOTE = r"""
[ -d "$1" ] || { echo "there is no run folder $1" >&2; exit 1; }
me=$(id -un) owner=$(stat -c %U "$1")
[ -O "$1" ] || [ "$(id -u)" = 0 ] ||
    { echo "$1 belongs to $owner, and you are $me: only $owner may cancel it" >&2; exit 1; }
[ -r "$1/run.json" ] || { echo "$1 is no run folder: it has no readable run.json" >&2; exit 1; }
if [ -e "$1/done" ]; then echo done; exit 0; fi
printf '%s' '{"reason": "cancelled by the user", "by": "user"}' >"$1/stop"
"""

_SWEEP = r"""[ ! -f "$1/sweep.json" ] || cat "$1/sweep.json" """


class _Done(UserError):
    """A run that needs no cancelling."""

    def __init__(self, run: str) -> None:
        super().__init__(f"{run} is done", "there is nothing to cancel")


def cancel(run: Run, cluster: Cluster = "") -> None:
    """Stop a run, or every run of a sweep: end its job, remove its other attempts from the queue, add no new ones."""
    from superpod.slurm.profiles import profiles
    from superpod.slurm.submission import connection

    slurm = connection.connect(profiles.load(cluster)) if cluster else connection.Connection()
    members = _members(run, slurm)
    if members is None:
        _cancel(run, slurm)
        return
    refused: list[str] = []
    for member in members:
        try:
            _cancel(member, slurm)
        except _Done as error:
            print(error)
        except UserError as error:  # the others still are to be cancelled
            refused.append(f"  - {error}" + (f"\n    next: {error.hint}" if error.hint else ""))
    if refused:
        raise UserError("\n".join([f"{len(refused)} of {len(members)} runs are not cancelled", *refused]))


def _members(run: str, slurm: Connection) -> list[str] | None:
    """The run folders of a sweep, here or behind SSH; None when the folder is no sweep's."""
    from superpod.reports import sweep

    folder = Path(run).absolute()
    if not slurm.remote:
        return [str(path) for _, path in sweep.runs_of(folder)] if sweep.is_sweep(folder) else None
    text = slurm.shell(_SWEEP, run)
    if not text:
        return None
    try:
        record = json.loads(text)
    except ValueError:
        record = None  # refused as a sweep that names no runs
    return [str(path) for _, path in sweep.runs_in(record, folder)]


def _cancel(run: str, slurm: Connection) -> None:
    from superpod.runtime.runs.run_folder import RunFolder
    from superpod.slurm.submission.submit import job_name

    if not slurm.remote:
        _stop(RunFolder.open(run))
    elif slurm.shell(_REMOTE, run).strip() == "done":
        raise _Done(run)
    slurm.run(["scancel", f"--name={job_name(str(Path(run).absolute()))}"])
    print(f"cancelled {run}")


def _stop(folder: RunFolder) -> None:
    """Leave the mark that no further attempt starts.

    Raises:
        UserError: the run is another user's, done, of this machine, or its folder cannot be written.
    """
    from superpod.runtime.attempts import guard
    from superpod.runtime.runs import owner, run_state

    owner.refuse_others(folder.path, "cancel it")
    if folder.done:
        raise _Done(str(folder.path))
    if folder.is_local:
        raise UserError(f"{folder.path} runs without Slurm", "press Ctrl-C where it runs: it saves first")
    guard.stop(folder, "cancelled by the user", by=run_state.StoppedBy.USER)
    if folder.stop is None:
        marker = folder.path / run_state.STOP
        raise UserError(f"{marker} cannot be written", "make room there, then cancel it once more")
