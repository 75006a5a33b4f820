"""`recipes render`: the sbatch script of a recipe on a cluster."""

from __future__ import annotations

from superpod.cli.request_options import Data, Name, Nodes, Overrides
from superpod.cli.submit import AttemptTime, SharedRuns, TargetCluster, submission_of


def render(
    name: Name,
    cluster: TargetCluster,
    overrides: Overrides = None,
    num_nodes: Nodes = None,
    data: Data = None,
    time: AttemptTime = "",
    runs: SharedRuns = "",
) -> None:
    """Print a plain sbatch script that trains a recipe on a cluster."""
    from superpod.slurm.submit import script

    print(script(submission_of(name, cluster, overrides, num_nodes, data, time, runs)), end="")
