"""`--profile torch|nsys` with its steps and ranks: what it becomes, and what can be refused before NeMo is imported."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.options.shared_options import spread
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.slurm.profiles.profiles import Cluster

STEPS, RANKS = "10-12", "0"
NSYS_ON_NODES = (
    "nsys must be on the PATH of the ranks, which only their image can tell; without it they train unprofiled"
)


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """What is profiled of a run; small by default."""

    profile: Annotated[
        str, typer.Option("--profile", metavar="TOOL", help="Profile a few steps: torch, or nsys (Nsight Systems).")
    ] = ""
    profile_steps: Annotated[str, typer.Option("--profile-steps", help="Steps of --profile, the first is 1.")] = STEPS
    profile_ranks: Annotated[str, typer.Option("--profile-ranks", help="Ranks of --profile, such as 0,8.")] = RANKS

    def text(self) -> str:
        """As `Request.profile` has it; "" where nothing is profiled.

        Raises:
            UserError: no such profiler, steps or ranks; or steps and ranks without a profiler.
        """
        from superpod.requests.profile_request import ProfileRequest

        for option, value, default in (
            ("--profile-steps", self.profile_steps, STEPS),
            ("--profile-ranks", self.profile_ranks, RANKS),
        ):
            if not self.profile and value != default:
                raise UserError(f"{option} {value} without --profile", "add --profile torch, or --profile nsys")
        if not self.profile:
            return ""
        return str(ProfileRequest.from_options(self.profile, self.profile_steps, self.profile_ranks))

    def require_here(self) -> str:
        """As `text`, on this machine: with nsys on the PATH and a GPU, where that is to record. Raises UserError."""
        from superpod.launch.preflight import may_have_gpu

        text = self.text()
        if self.profile == "nsys" and not may_have_gpu():
            raise UserError(
                "--profile nsys records the work of GPUs, and this machine has none", "--profile torch works on CPUs"
            )
        if self.profile == "nsys" and not shutil.which("nsys", path=os.environ.get("PATH")):
            raise UserError(
                "--profile nsys: no nsys is on this PATH",
                "install Nsight Systems, or --profile torch, which needs none",
            )
        return text

    def require_there(self, cluster: Cluster) -> str:
        """As `text`, on a cluster: nsys needs GPUs to record. Raises UserError."""
        text = self.text()
        if self.profile == "nsys" and cluster.declared_only:
            raise UserError(
                f"--profile nsys records the work of GPUs, and {cluster.name} has none", "--profile torch works on CPUs"
            )
        return text


def with_profile(verb: Callable[..., None]) -> Callable[..., None]:
    """Replace the decorated verb's parameter `profiling` by the options of `ProfileOptions`."""
    return spread(ProfileOptions, "profiling")(verb)
