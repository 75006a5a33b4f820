"""The number of nodes of a job that must share an NVLink domain: sbatch --segment on clusters with topology/block.

On NVL72 a node is a tray of four GPUs, and NVLink joins the 18 trays of a rack. A group of ranks that spans trays and
was planned within NVLink (TP, TP x CP, the experts' EP) would communicate over InfiniBand if its trays were in two
racks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from superpod.planner.planned_job import PlannedJob
    from superpod.slurm.profiles.profiles import Cluster


def segment(cluster: Cluster, job: PlannedJob, nodes: int, gpus: int) -> int:
    """Return the number of nodes, with `gpus` ranks each, that must share a domain; 0 if there is no constraint.

    A segment size must divide the number of nodes (sbatch(1)) and fit into a domain; also 0 if no size does.
    """
    has_own_segment = any(option.startswith("--segment") for option in cluster.slurm.options)
    if cluster.slurm.topology != "block" or has_own_segment:
        return 0
    domain = job.node.nvlink_domain
    needed_nodes = -(-_ranks_on_nvlink(job, domain) // gpus)
    fitting_sizes = [size for size in range(2, domain // gpus + 1) if nodes % size == 0 and size >= needed_nodes]
    return fitting_sizes[0] if needed_nodes > 1 and fitting_sizes else 0


def _ranks_on_nvlink(job: PlannedJob, domain: int) -> int:
    """Return the span, in ranks, of the largest group that was planned within a domain.

    Megatron orders ranks by TP, CP, DP, PP; for experts, ETP and EP come first.
    """
    layout = job.layout
    experts = (layout.etp or layout.tp) * layout.ep
    return max(span for span in (1, layout.tp, layout.tp * layout.cp, experts) if span <= domain)
