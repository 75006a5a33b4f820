"""The options `--profile`, `--profile-steps` and `--profile-ranks`, which are checked before NeMo is imported."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.options.shared_options import spread
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.slurm.profiles.profiles import Cluster

DEFAULT_STEPS, DEFAULT_RANKS = "10-12", "0"


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Options for profiling a few steps of a run; each field is an option of a command."""

    profile: Annotated[
        str,
        typer.Option("--profile", metavar="TOOL", help="Profile a few steps with torch or nsys (Nsight Systems)."),
    ] = ""
    profile_steps: Annotated[str, typer.Option("--profile-steps", help="Steps to profile, from 1.")] = DEFAULT_STEPS
    profile_ranks: Annotated[str, typer.Option("--profile-ranks", help="Ranks to profile, such as 0,8.")] = (
        DEFAULT_RANKS
    )

    def profile_text(self) -> str:
        """Return the value for `Request.profile`; "" without --profile.

        Raises:
            UserError: the profiler, steps or ranks are invalid, or steps or ranks are given without a profiler.
        """
        from superpod.requests.profile_request import ProfileRequest

        for option, value, default in (
            ("--profile-steps", self.profile_steps, DEFAULT_STEPS),
            ("--profile-ranks", self.profile_ranks, DEFAULT_RANKS),
        ):
            if not self.profile and value != default:
                raise UserError(f"{option} {value} requires --profile", "add --profile torch or --profile nsys")
        if not self.profile:
            return ""
        return str(ProfileRequest.from_options(self.profile, self.profile_steps, self.profile_ranks))

    def check_on_machine(self) -> str:
        """Return `profile_text()` for a run on this machine. Raises UserError if nsys, or a GPU for it, is missing."""
        from superpod.launch.preflight import may_have_gpu

        text = self.profile_text()
        if self.profile == "nsys" and not may_have_gpu():
            raise UserError("--profile nsys needs a GPU, which this machine lacks", "use --profile torch on CPUs")
        if self.profile == "nsys" and not shutil.which("nsys", path=os.environ.get("PATH")):
            raise UserError("--profile nsys: nsys is not on PATH", "install Nsight Systems, or use --profile torch")
        return text

    def check_on_cluster(self, cluster: Cluster) -> str:
        """Return `profile_text()` for a run on a cluster. Raises UserError for nsys if the cluster has no GPUs."""
        text = self.profile_text()
        if self.profile == "nsys" and cluster.declared_only:
            raise UserError(f"--profile nsys needs GPUs, which {cluster.name} lacks", "use --profile torch on CPUs")
        return text


with_profile = spread(ProfileOptions, "profiling")
"""Decorator that replaces the parameter `profiling` of a command by the fields of `ProfileOptions`."""
