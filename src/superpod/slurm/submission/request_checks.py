"""First steps of `recipes submit`, `render` and `submit --resume`: check the request and query the cluster."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.errors import UserError
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
    """Return a cluster profile that permits this time limit and this folder for runs.

    Raises:
        UserError: an option is invalid.
    """
    from superpod.slurm.preflight import preflight
    from superpod.slurm.profiles import profiles

    refuse_time(time)
    if runs and not runs.startswith("/"):
        raise UserError(
            f"--runs {runs} is not an absolute path, which every node needs", "use a path on a shared file system"
        )
    profile = profiles.load(cluster)
    preflight.refuse_folder(profile, runs or profile.folders.runs)
    return profile


def check_request(request: Request, profile: Cluster) -> None:
    """Check without NeMo or access to the cluster that its GPUs can run a request.

    Raises:
        UserError: they cannot, or the recipe cannot train.
    """
    from superpod.collection.facts import proof_level
    from superpod.collection.registry import find
    from superpod.slurm.preflight import preflight

    preflight.refuse_other_gpu(request, profile)
    proof_level.require_trainable(find(request.recipe))


@functools.cache
def _note_without_nemo() -> None:
    """Print the note once per command, although a sweep resolves many requests."""
    from superpod.requests import deferred

    print(f"note: {deferred.NO_NEMO_NOTE}", file=sys.stderr)


def resolve_request(request: Request, label: str = "") -> ResolvedRun:
    """Resolve a request; if NeMo has to build it, show the progress with the suffix `label`.

    If NeMo is not installed on this machine, only plan the request: the job will build it.
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
    """Connect to a cluster and query its state, including the answer of `sbatch --test-only` to a job of this size.

    Called before NeMo is imported, so that an unreachable cluster is reported at once.
    """
    from superpod.slurm.preflight import preflight
    from superpod.slurm.profiles import live_cluster
    from superpod.slurm.submission import connection

    slurm = connection.connect(profile)
    python = slurm_submit.ranks_python(profile) if not profile.container.image else ""
    paths = preflight.paths_to_check(profile, data.absolute() if data else None)
    return slurm, live_cluster.query_cluster(slurm, profile, runs or profile.folders.runs, paths, python, size.shape)


def refuse_missing_resources(claim: Claim) -> None:
    """Refuse resources that the cluster does not have, before NeMo is imported; print why a job may have to wait.

    Raises:
        UserError: a resource is missing; the message lists all findings.
    """
    from superpod.slurm.preflight import preflight

    preflight.refuse_claim(claim)
    for note in preflight.notes(claim):
        hint = f"\n  next: {note.hint}" if note.hint else ""
        print(f"note: {note.message}{hint}", file=sys.stderr)


def refuse_webhook(profile: Cluster) -> None:
    """Refuse a webhook that jobs could not use, or whose file other users can read.

    Raises:
        UserError: the webhook is refused; the message never includes its address.
    """
    from superpod.runtime.attempts import notify

    table = profile.notify
    if profile.login.host:
        if table.webhook_env:
            hint = f"write the address to a file of mode 0600 on {profile.login.host} and set notify.webhook_file"
            raise UserError("notify.webhook_env: variables of this shell are not passed over SSH", hint)
        return
    if table.webhook_env and profile.chain.self_submit:
        hint = "write the address to a file of mode 0600 and set notify.webhook_file"
        raise UserError("notify.webhook_env: jobs submitted by jobs (chain.self_submit) do not get this variable", hint)
    _, problem = notify.read_address(table.webhook_env, table.webhook_file, os.environ)
    if problem:
        raise UserError(f"[notify] of {profile.name}: {problem}", "see Messages in docs/slurm.md, or leave out the key")


def refuse_time(time: str) -> None:
    """Raise UserError if `time` is not in Slurm's time format; "" (use the limit in the profile) is accepted."""
    from superpod.slurm.profiles import profile_values

    if time:
        try:
            profile_values.seconds(time)
        except ValueError as error:
            raise UserError(str(error), "for example 4:00:00 or 1-12:00:00") from None
