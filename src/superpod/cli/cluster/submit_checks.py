"""What `recipes submit`, `recipes render` and `submit --resume` do first: read the request, and ask the cluster."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.options.request_options import request_of
from superpod.cli.options.size_options import SizeOptions
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.requests.request import Request
    from superpod.requests.resolve import ResolvedRun
    from superpod.slurm.preflight.limits import JobSize
    from superpod.slurm.preflight.preflight import Claim
    from superpod.slurm.profiles.live_cluster import LiveCluster
    from superpod.slurm.profiles.profiles import Cluster
    from superpod.slurm.submission.connection import Connection

TargetCluster = Annotated[str, typer.Option("--cluster", help="A profile: dgx_h100, ..., or the path of a TOML file.")]
AttemptTime = Annotated[
    str, typer.Option("--time", help="Time limit of one attempt, as Slurm writes it; default: the profile's.")
]
SharedRuns = Annotated[str, typer.Option("--runs", help="Folder of the run folders; default: the profile's.")]


def checked(
    name: str,
    cluster: str,
    overrides: list[str] | None,
    size: SizeOptions,
    data: Path | None,
    time: str,
    runs: str,
) -> tuple[Request, Cluster]:
    """What a command line asks for, and where. What can be refused without NeMo and without the cluster is refused.

    Raises:
        UserError: with what is wrong, or what the cluster's GPU cannot run.
    """
    from superpod.collection.facts import proof_level
    from superpod.collection.registry import find
    from superpod.slurm.preflight import preflight
    from superpod.slurm.profiles import profiles

    refuse_time(time)
    if runs and not runs.startswith("/"):
        raise UserError(f"--runs {runs}: every node must find this folder", "give an absolute path on a shared disk")
    profile = profiles.load(cluster)
    preflight.refuse_folder(profile, runs or profile.folders.runs)
    request = request_of(name, overrides, data, size)
    preflight.refuse_other_gpu(request, profile)
    proof_level.require_trainable(find(request.recipe))
    return request, profile


@functools.cache
def _note_without_nemo() -> None:
    """Once per command: a sweep resolves many."""
    from superpod.requests import deferred

    print(f"note: {deferred.NOTE}", file=sys.stderr)


def resolved(request: Request, which: str = "") -> ResolvedRun:
    """The request resolved. The first time NeMo builds it, which takes so long that it is shown, with `which`.

    Where NeMo is not installed, the request is planned, and the job builds it.
    """
    from superpod.cli import tables
    from superpod.cli.running.progress import waiting
    from superpod.collection import installed
    from superpod.common.quiet import quietly
    from superpod.requests.deferred import needs_nemo, resolve_for_job

    if installed.missing():
        _note_without_nemo()
        return resolve_for_job(request)
    with quietly() as terminal:  # also where the cache has it: a torn file is built again
        if not needs_nemo(request):
            return resolve_for_job(request)
        with waiting(tables.console(terminal), f"building the recipe with NeMo (10 to 20 s, once){which}"):
            return resolve_for_job(request)


def facts_of(profile: Cluster, runs: str, data: Path | None, size: JobSize) -> tuple[Connection, LiveCluster]:
    """The connection to a cluster, and its live facts, with sbatch's answer to a job of this size.

    One that does not answer is reported before NeMo is imported.
    """
    from superpod.slurm.preflight import preflight
    from superpod.slurm.profiles import live_cluster
    from superpod.slurm.submission import connection

    slurm = connection.connect(profile)
    python = slurm_submit().python_of(profile) if not profile.container.image else ""
    paths = preflight.paths(profile, data.absolute() if data else None)
    return slurm, live_cluster.query_cluster(slurm, profile, runs or profile.folders.runs, paths, python, size.shape)


def refuse_unmet(wanted: Claim) -> None:
    """Refuse, before NeMo is imported, what the cluster cannot give; print what makes a job wait there.

    Raises:
        UserError: with every finding.
    """
    from superpod.slurm.preflight import preflight

    preflight.refuse_claim(wanted)
    for note in preflight.notes(wanted):
        print(f"note: {note.message}" + (f"\n  next: {note.hint}" if note.hint else ""), file=sys.stderr)


def slurm_submit() -> ModuleType:
    """slurm/submission/submit.py, imported when it is needed."""
    from superpod.slurm.submission import submit

    return submit


def refuse_webhook(profile: Cluster) -> None:
    """Refuse a webhook that no job could reach: a variable that is not set here, a file that others can read.

    Raises:
        UserError: with what is wrong, and never with the address.
    """
    from superpod.runtime.attempts import notify

    table = profile.notify
    if profile.login.host:
        if table.webhook_env:
            hint = f"write the address into a file of mode 0600 on {profile.login.host}: notify.webhook_file"
            raise UserError("notify.webhook_env: a variable of this shell does not travel over SSH", hint)
        return
    if table.webhook_env and profile.chain.self_submit:
        hint = "write the address into a file of mode 0600: notify.webhook_file"
        raise UserError("notify.webhook_env: jobs that jobs submit (chain.self_submit) do not get this variable", hint)
    _, problem = notify.address(table.webhook_env, table.webhook_file, os.environ)
    if problem:
        raise UserError(f"[notify] of {profile.name}: {problem}", "docs/slurm.md, Messages; or leave the key out")


def refuse_time(time: str) -> None:
    """Refuse a time limit that is none of Slurm's; '' is no limit. Raises UserError."""
    from superpod.slurm.profiles import profile_values

    if time:
        try:
            profile_values.seconds(time)
        except ValueError as error:
            raise UserError(str(error), "write it like 4:00:00 or 1-12:00:00") from None
