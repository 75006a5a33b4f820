"""First steps of `recipes submit`, `render` and `submit --resume`: checks the request and queries the cluster."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.errors import UserError
from superpod.slurm.preflight import preflight
from superpod.slurm.profiles import profile_values, profiles
from superpod.slurm.submission import connection
from superpod.slurm.submission import submit as slurm_submit

if TYPE_CHECKING:
    from superpod.requests.request import Request
    from superpod.requests.resolve import ResolvedRun
    from superpod.slurm.preflight.limits import JobSize
    from superpod.slurm.preflight.preflight import Claim
    from superpod.slurm.profiles.live_cluster import LiveCluster
    from superpod.slurm.profiles.profiles import Cluster
    from superpod.slurm.submission.connection import Connection


def load_profile(cluster: str, time: str, runs: str) -> Cluster:
    """Return a cluster profile after checking the options --cluster, --time and --runs ("" = from the profile).

    Raises:
        UserError: an option is invalid.
    """
    refuse_time(time)
    if runs and not runs.startswith("/"):
        raise UserError(f"--runs must be an absolute path, not {runs}", "use a path on a shared file system")
    profile = profiles.load(cluster)
    preflight.refuse(list(preflight.folder_findings(profile, runs or profile.folders.runs)))
    return profile


def check_request(request: Request, profile: Cluster) -> None:
    """Check without NeMo, and without access to the cluster, that its GPUs can run a recipe.

    Raises:
        UserError: they cannot run it, or the recipe is known not to train.
    """
    from superpod.collection.facts import proof_level
    from superpod.collection.registry import find
    from superpod.slurm.profiles import other_gpu

    preflight.refuse(other_gpu.request_findings(request, profile.gpu))
    proof_level.require_trainable(find(request.recipe))


@functools.cache
def _note_without_nemo() -> None:
    """Print a note that NeMo is not installed, once per process."""
    from superpod.requests import deferred

    print(f"note: {deferred.NO_NEMO_NOTE}", file=sys.stderr)


def resolve_request(request: Request, label: str = "") -> ResolvedRun:
    """Return the resolved run of a request. If NeMo must build it, show a progress message that ends with `label`.

    If NeMo is not installed on this machine, the request is only planned, and the job builds it.
    """
    from superpod.collection import installed
    from superpod.common.quiet import silence_libraries
    from superpod.launch.display import consoles
    from superpod.launch.display.progress_bar import spinner
    from superpod.requests.deferred import needs_nemo, resolve_for_job

    if installed.missing_package():
        _note_without_nemo()
        return resolve_for_job(request)
    with silence_libraries() as terminal:  # also for a cached request, because a corrupt cache file is rebuilt
        if not needs_nemo(request):
            return resolve_for_job(request)
        with spinner(consoles.console(terminal), f"building the recipe with NeMo (10 to 20 s, once){label}"):
            return resolve_for_job(request)


def connect_and_query(profile: Cluster, runs: str, data: Path | None, size: JobSize) -> tuple[Connection, LiveCluster]:
    """Return a connection to a cluster and its state, including the answer of `sbatch --test-only` to a job.

    `runs` is the folder for runs ("" = that of the profile), `data` a data folder to look up. Must be called before
    NeMo is imported, so that an unreachable cluster is reported at once.
    """
    from superpod.slurm.profiles import live_cluster

    slurm = connection.connect(profile)
    python = slurm_submit.ranks_python(profile) if not profile.container.image else ""
    paths = preflight.paths_to_check(profile, data.absolute() if data else None)
    return slurm, live_cluster.query_cluster(slurm, profile, runs or profile.folders.runs, paths, python, size)


def refuse_missing_resources(claim: Claim) -> None:
    """Check that the cluster has the resources for a submission, without NeMo; print notes on reservations.

    Raises:
        UserError: a resource is missing; the message contains all findings.
    """
    preflight.refuse(preflight.claim_findings(claim))
    for note in preflight.notes(claim):
        hint = f"\n  next: {note.hint}" if note.hint else ""
        print(f"note: {note.message}{hint}", file=sys.stderr)


def refuse_webhook(profile: Cluster) -> None:
    """Check that jobs can use the webhook of a profile, and that other users cannot read the file with its address.

    Raises:
        UserError: the webhook is refused; the message never contains its address.
    """
    from superpod.runtime.attempts import notify

    table = profile.notify
    if profile.login.host:
        if table.webhook_env:
            hint = f"write the address to a file of mode 0600 on {profile.login.host} and set notify.webhook_file"
            raise UserError("notify.webhook_env cannot be used, because variables are not passed over SSH", hint)
        return
    if table.webhook_env and profile.chain.self_submit:
        hint = "write the address to a file of mode 0600 and set notify.webhook_file"
        raise UserError("notify.webhook_env is not passed to jobs that other jobs submit (chain.self_submit)", hint)
    _, problem = notify.read_address(table.webhook_env, table.webhook_file, os.environ)
    if problem:
        raise UserError(f"[notify] of {profile.name}: {problem}", "see Messages in docs/slurm.md, or remove the key")


def refuse_time(time: str) -> None:
    """Raise UserError if `time` is neither a time in Slurm's format nor "", the limit of the profile."""
    if time:
        try:
            profile_values.seconds(time)
        except ValueError as error:
            raise UserError(str(error), "for example 4:00:00 or 1-12:00:00") from None
