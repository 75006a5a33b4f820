"""`recipes render`: the sbatch script of a recipe on a cluster."""

from __future__ import annotations

from superpod.cli.request_options import Data, Name, Nodes, Overrides
from superpod.cli.submit import AttemptTime, SharedRuns, TargetCluster, checked, resolved


def render(
    name: Name,
    cluster: TargetCluster,
    overrides: Overrides = None,
    num_nodes: Nodes = None,
    data: Data = None,
    time: AttemptTime = "",
    runs: SharedRuns = "",
) -> None:
    """Print a plain sbatch script that trains a recipe on a cluster; refuse one that cannot train there."""
    from superpod.slurm import preflight
    from superpod.slurm.submit import Submission, script

    request, profile = checked(name, cluster, overrides, num_nodes, data, time, runs)
    submission = Submission(resolved(request), profile, runs, time)
    preflight.refuse_unfit(submission)
    print(script(submission), end="")
