"""What ranks find in their environment, with the reason beside each variable: by GPU, network, precision and layout.

A table, so that it can be read whole. `variables` picks from it; `recipes render` writes the reasons into the job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from superpod.planner import hardware

if TYPE_CHECKING:
    from superpod.planner.hardware import Node
    from superpod.planner.layout import Layout
    from superpod.slurm.profiles import Cluster


@dataclass(frozen=True)
class Variable:
    """One variable of the ranks and why it is set."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class EnvironmentFacts:
    """What the choice depends on."""

    layout: Layout
    precision: str
    node: Node
    network: str
    on_gpu: bool = True

    @property
    def splits_layers(self) -> bool:
        """Whether ranks communicate inside a layer: tensor or context parallelism."""
        return self.layout.tp > 1 or self.layout.cp > 1

    @property
    def own_fsdp(self) -> bool:
        """Whether Megatron-FSDP shards gradients or weights."""
        return self.layout.sharding in ("zero2", "zero3")


When = Callable[[EnvironmentFacts], bool]

# Sources: NeMo 2.7.3 `lightning/run/plugins.py` (PerfEnvPlugin) and `megatron_comm_overlap.py`; Megatron-Bridge
# `scripts/performance`; NCCL's and PyTorch's lists of variables.
TABLE: tuple[tuple[str, str, When, str], ...] = (
    ("PYTHONUNBUFFERED", "1", lambda f: True, "a rank that is killed has written its last lines"),
    ("OMP_NUM_THREADS", "1", lambda f: True, "as torchrun sets it: ranks of a node must not fight for its cores"),
    ("TOKENIZERS_PARALLELISM", "false", lambda f: True, "tokenizer threads do not survive the data loader's fork"),
    ("HF_HUB_OFFLINE", "1", lambda f: True, "a thousand ranks must not ask the hub; preflight looks for the files"),
    ("TRANSFORMERS_OFFLINE", "1", lambda f: True, "the same, for transformers"),
    (
        *("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        lambda f: f.on_gpu and not f.node.gpu.keeps_queue_order and f.splits_layers and not f.own_fsdp,
        "kernels start in the order they are queued, so that communication of TP and CP goes before the GEMM hiding it",
    ),
    (
        *("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
        lambda f: f.on_gpu and f.node.gpu.keeps_queue_order and f.splits_layers and not f.own_fsdp,
        "Blackwell keeps that order by itself; with 8 queues, the default, streams of TP and CP would share one",
    ),
    (
        *("CUDA_DEVICE_MAX_CONNECTIONS", "8"),
        lambda f: f.on_gpu and f.own_fsdp,
        "Megatron-FSDP refuses 1: its gathers must run beside the layers",
    ),
    ("NVTE_FWD_LAYERNORM_SM_MARGIN", "16", lambda f: f.on_gpu, "leave SMs to NCCL while norms run, forward"),
    ("NVTE_BWD_LAYERNORM_SM_MARGIN", "16", lambda f: f.on_gpu, "... and backward"),
    (
        *("NVTE_NORM_FWD_USE_CUDNN", "1"),
        lambda f: f.on_gpu and f.precision == "mxfp8",
        "only cuDNN's norm writes MXFP8 in one kernel",
    ),
    ("NVTE_NORM_BWD_USE_CUDNN", "1", lambda f: f.on_gpu and f.precision == "mxfp8", "... and its backward"),
    (
        *("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        lambda f: f.on_gpu,
        "fragmentation has ended runs at 59 of 80 GB",
    ),
    ("TORCH_NCCL_HIGH_PRIORITY", "1", lambda f: f.on_gpu, "communication first when both wait for an SM"),
    ("TORCH_FR_BUFFER_SIZE", "20000", lambda f: f.on_gpu, "flight recorder: what each rank did last, at a timeout"),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", lambda f: f.on_gpu, "... written when a collective times out"),
    ("NCCL_DEBUG", "WARN", lambda f: f.on_gpu, "errors name the peer; INFO would write megabytes a rank"),
    ("NCCL_NVLS_ENABLE", "0", lambda f: f.on_gpu, "NVLink SHARP takes GPU memory that the planner gives to the model"),
    (
        *("NCCL_IB_DISABLE", "1"),
        lambda f: f.on_gpu and f.network == "ethernet",
        "no RDMA here: do not spend the start-up on looking for it",
    ),
    ("NCCL_IB_GID_INDEX", "3", lambda f: f.on_gpu and f.network == "roce", "the RoCE v2 address, which is routed"),
    (
        *("NCCL_NET_GDR_LEVEL", "PHB"),
        lambda f: f.on_gpu and f.node.nvlink_c2c,
        "Grace: NICs reach GPU memory across the host bridge",
    ),
    ("NCCL_NET_GDR_C2C", "1", lambda f: f.on_gpu and f.node.nvlink_c2c, "... over NVLink-C2C"),
)
"""name, value, when, why."""


def facts(cluster: Cluster, layout: Layout, precision: str) -> EnvironmentFacts:
    """What the environment of this recipe on this cluster depends on."""
    return EnvironmentFacts(
        layout=layout,
        precision=precision,
        node=hardware.builtin().node(cluster.gpu),
        network=cluster.network.kind,
        on_gpu=not cluster.declared_only,
    )


def variables(cluster: Cluster, layout: Layout, precision: str) -> list[Variable]:
    """The environment of every rank, in the order it is written; a profile's own `[env]` comes last and wins."""
    known = facts(cluster, layout, precision)
    variables = [Variable(name, value, reason) for name, value, when, reason in TABLE if when(known)]
    variables += _of_the_site(cluster)
    own = [Variable(name, value, "the profile says so") for name, value in cluster.env.items()]
    return [v for v in variables if v.name not in cluster.env] + own


def _of_the_site(cluster: Cluster) -> list[Variable]:
    variables, network = [], cluster.network
    if network.interface:
        why = "the network that nodes greet each other on"
        variables += [Variable("NCCL_SOCKET_IFNAME", network.interface, why)] if not cluster.declared_only else []
        variables.append(Variable("GLOO_SOCKET_IFNAME", network.interface, why))
    if network.hcas:
        variables.append(Variable("NCCL_IB_HCA", network.hcas, "the compute HCAs; the others carry storage"))
    if cluster.folders.cache:
        variables.append(Variable("HF_HOME", cluster.folders.cache, "tokenizers and weights, fetched beforehand"))
    return variables
