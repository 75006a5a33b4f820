"""`recipes cancel`: stop a run permanently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.cli.options.request_options import Cluster, Run
from superpod.errors import UserError, counted
from superpod.slurm.profiles import profiles
from superpod.slurm.submission import connection

if TYPE_CHECKING:
    from superpod.runtime.runs.run_folder import RunFolder
    from superpod.slurm.submission.connection import Connection

_REMOTE = r"""
[ -d "$1" ] || { echo "run folder $1 does not exist" >&2; exit 1; }
me=$(id -un) owner=$(stat -c %U "$1")
[ -O "$1" ] || [ "$(id -u)" = 0 ] ||
    { echo "$1 belongs to $owner and you are $me: only $owner may cancel it" >&2; exit 1; }
[ -r "$1/run.json" ] || { echo "$1 is not a run folder: it has no readable run.json" >&2; exit 1; }
if [ -e "$1/done" ]; then echo done; exit 0; fi
printf '%s' '{"reason": "cancelled by the user", "by": "user"}' >"$1/stop"
"""

_READ_SWEEP = r"""[ ! -f "$1/sweep.json" ] || cat "$1/sweep.json" """


class _RunDone(UserError):
    """The run to cancel is already done."""

    def __init__(self, run: str) -> None:
        super().__init__(f"{run} is done", "there is nothing to cancel")


def cancel(run: Run, cluster: Cluster = "") -> None:
    """Cancel a run, or all runs of a sweep: cancel its running and queued jobs, and prevent new attempts."""
    slurm = connection.connect(profiles.load(cluster)) if cluster else connection.Connection()
    members = _members(run, slurm)
    if members is None:
        _cancel(run, slurm)
        return
    refused: list[str] = []
    for member in members:
        try:
            _cancel(member, slurm)
        except _RunDone as error:
            print(error)
        except UserError as error:  # continue with the other runs
            hint = f"\n    next: {error.hint}" if error.hint else ""
            refused.append(f"  - {error}{hint}")
    if refused:
        raise UserError(
            "\n".join([f"{len(refused)} of {counted(len(members), 'run')} could not be cancelled", *refused])
        )


def _members(run: str, slurm: Connection) -> list[str] | None:
    """Return the run folders of a sweep, on this machine or behind SSH; None if `run` is not a sweep."""
    from superpod.reports import sweep

    folder = Path(run).absolute()
    if not slurm.remote:
        return [str(path) for _, path in sweep.read_members(folder)] if sweep.is_sweep(folder) else None
    text = slurm.shell(_READ_SWEEP, run)
    if not text:
        return None
    try:
        record = json.loads(text)
    except ValueError:
        record = None  # `parse_members` rejects it
    return [str(path) for _, path in sweep.parse_members(record, folder)]


def _cancel(run: str, slurm: Connection) -> None:
    """Write the stop marker of a run and cancel its jobs. Raises _RunDone if the run is done, or another UserError."""
    from superpod.runtime.runs.run_folder import RunFolder
    from superpod.slurm.submission.submit import job_name

    if not slurm.remote:
        _stop(RunFolder.open(run))
    elif slurm.shell(_REMOTE, run).strip() == "done":
        raise _RunDone(run)
    slurm.run(["scancel", f"--name={job_name(str(Path(run).absolute()))}"])
    print(f"cancelled {run}")


def _stop(folder: RunFolder) -> None:
    """Write the stop marker of a run, which prevents further attempts.

    Raises:
        UserError: the run belongs to another user, is done or runs without Slurm, or its folder is not writable.
    """
    from superpod.runtime.attempts import guard
    from superpod.runtime.runs import owner, run_state

    owner.refuse_others(folder.path, "cancel it")
    if folder.done:
        raise _RunDone(str(folder.path))
    if folder.is_local:
        raise UserError(f"{folder.path} runs without Slurm", "press Ctrl-C in its terminal to save and stop")
    guard.stop(folder, "cancelled by the user", by=run_state.StoppedBy.USER)
    if folder.stop is None:
        marker = folder.path / run_state.STOP
        raise UserError(f"{marker} cannot be written", "free some disk space, then cancel the run again")
