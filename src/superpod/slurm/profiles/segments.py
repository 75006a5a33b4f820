"""Computes the number of nodes that must share an NVLink domain, for sbatch --segment with topology/block.

On NVL72 a node is a tray of four GPUs, and NVLink connects the 18 trays of a rack. A group of ranks that spans trays
and was planned within NVLink (TP, TP x CP, or EP of the experts) would communicate over InfiniBand if its trays were in
two racks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from superpod.planner.planned_job import PlannedJob
    from superpod.slurm.profiles.profiles import Cluster


def segment(cluster: Cluster, job: PlannedJob, nodes: int, gpus: int) -> int:
    """Return the segment size: the number of nodes that must share an NVLink domain; 0 = no constraint.

    A segment size must divide the number of nodes (sbatch(1)) and fit into a domain; the result is 0 if none does.
    `gpus` is the number of GPUs per node.
    """
    has_own_segment = any(option.startswith("--segment") for option in cluster.slurm.options)
    if cluster.slurm.topology != "block" or has_own_segment:
        return 0
    layout, domain = job.layout, job.node.nvlink_domain
    # Consecutive ranks of each group that may be planned within a domain: Megatron orders ranks by TP, CP, DP, PP; for
    # experts, by ETP and EP first.
    spans = (1, layout.tp, layout.tp * layout.cp, (layout.etp or layout.tp) * layout.ep)
    needed_nodes = -(-max(span for span in spans if span <= domain) // gpus)
    fitting_sizes = [size for size in range(2, domain // gpus + 1) if nodes % size == 0 and size >= needed_nodes]
    return fitting_sizes[0] if needed_nodes > 1 and fitting_sizes else 0
