"""Which nodes of a job must share an NVLink domain: sbatch's --segment, where Slurm knows the domains (topology/block).

On NVL72 a node is a tray of four GPUs, and NVLink joins the 18 trays of a rack. A group of ranks that leaves its tray
and was planned within NVLink (TP, TP x CP, the experts' EP) would run over InfiniBand on trays of two racks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from superpod.planner.planned_job import PlannedJob
    from superpod.slurm.profiles.profiles import Cluster


def segment(cluster: Cluster, job: PlannedJob, nodes: int, gpus: int) -> int:
    """Nodes that must lie together, `gpus` ranks on each; 0 where it does not matter or Slurm cannot do it.

    Slurm wants a segment to divide the job's nodes (sbatch(1)), and it must fit into a domain.
    """
    chosen = any(option.startswith("--segment") for option in cluster.slurm.options)
    if cluster.slurm.topology != "block" or chosen:
        return 0
    domain = job.node.nvlink_domain
    needed = -(-_ranks_on_nvlink(job, domain) // gpus)
    fitting = [size for size in range(2, domain // gpus + 1) if nodes % size == 0 and size >= needed]
    return fitting[0] if needed > 1 and fitting else 0


def _ranks_on_nvlink(job: PlannedJob, domain: int) -> int:
    """Consecutive ranks of the largest group that was planned within a domain.

    Megatron numbers ranks by TP, CP, DP, PP in this order, and those of the experts by ETP, EP first.
    """
    layout = job.layout
    experts = (layout.etp or layout.tp) * layout.ep
    return max(span for span in (1, layout.tp, layout.tp * layout.cp, experts) if span <= domain)
