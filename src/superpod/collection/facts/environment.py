"""What a run needs in the environment of its ranks, with the reason beside each variable: by GPU, layout, precision and
options. Render, submit, local runs and exported files take it from `variables`; a cluster adds its own
(`slurm/script/environment.py`).

Imports no NeMo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from superpod.errors import UserError
from superpod.planner.planned_job import PlannedJob


@dataclass(frozen=True)
class Variable:
    """One variable of the ranks and why it is set."""

    name: str
    value: str
    reason: str


When = Callable[[PlannedJob], bool]


def splits_layers(job: PlannedJob) -> bool:
    """Whether ranks communicate inside a layer: tensor or context parallelism."""
    return job.layout.tp > 1 or job.layout.cp > 1


def own_fsdp(job: PlannedJob) -> bool:
    """Whether Megatron-FSDP shards gradients or weights."""
    return job.layout.sharding in ("zero2", "zero3")


def userbuffers(job: PlannedJob) -> bool:
    """Whether Transformer Engine's userbuffers hide tensor-parallel communication."""
    return job.layout.tp > 1 and job.layout.sp and job.options.overlap_tp


# Sources: NeMo 2.7.3 `lightning/run/plugins.py` (PerfEnvPlugin) and `megatron_comm_overlap.py`; Megatron-Bridge
# `scripts/performance`; NCCL's and PyTorch's lists of variables. What a library asserts has its file and line.
TABLE: tuple[tuple[str, str, When, str], ...] = (
    (
        *("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        lambda j: not j.node.gpu.keeps_queue_order and splits_layers(j) and not own_fsdp(j),
        "kernels start in the order they are queued, so that communication of TP and CP goes before the GEMM hiding it",
    ),
    (
        *("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
        lambda j: j.node.gpu.keeps_queue_order and splits_layers(j) and not own_fsdp(j),
        "Blackwell keeps that order by itself; with 8 queues, the default, streams of TP and CP would share one",
    ),
    ("CUDA_DEVICE_MAX_CONNECTIONS", "8", own_fsdp, "Megatron-FSDP refuses 1: its gathers must run beside the layers"),
    (
        *("UB_SKIPMC", "1"),
        lambda j: userbuffers(j) and not j.node.gpu.multicast,
        "no NVLink multicast here: userbuffers exchange by CUDA IPC (TE 2.9 module/base.py:183)",
    ),
    ("NVTE_FWD_LAYERNORM_SM_MARGIN", "16", lambda j: True, "leave SMs to NCCL while norms run, forward"),
    ("NVTE_BWD_LAYERNORM_SM_MARGIN", "16", lambda j: True, "... and backward"),
    (
        *("NVTE_NORM_FWD_USE_CUDNN", "1"),
        lambda j: j.precision == "mxfp8",
        "only cuDNN's norm writes MXFP8 in one kernel",
    ),
    ("NVTE_NORM_BWD_USE_CUDNN", "1", lambda j: j.precision == "mxfp8", "... and its backward"),
    (
        *("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"),
        lambda j: j.options.deterministic,
        "deterministic: attention sums in a fixed order (megatron-core 0.15.3 extensions/transformer_engine.py:940)",
    ),
    (
        *("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        lambda j: j.options.deterministic,
        "deterministic: cuBLAS with a workspace for each stream (NVIDIA cuBLAS, results reproducibility)",
    ),
    (
        *("NCCL_ALGO", "^NVLS"),
        lambda j: j.options.deterministic,
        "deterministic: rings and trees sum in a fixed order (one of the values that Megatron-LM accepts)",
    ),
    (
        *("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        lambda j: not j.options.cuda_graphs,
        "fragmentation has ended runs at 59 of 80 GB",
    ),
    ("TORCH_NCCL_HIGH_PRIORITY", "1", lambda j: True, "communication first when both wait for an SM"),
    ("TORCH_FR_BUFFER_SIZE", "20000", lambda j: True, "flight recorder: what each rank did last, at a timeout"),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", lambda j: True, "... written when a collective times out"),
    ("NCCL_DEBUG", "WARN", lambda j: True, "errors name the peer; INFO would write megabytes a rank"),
    ("NCCL_NVLS_ENABLE", "0", lambda j: True, "NVLink SHARP takes GPU memory that the planner gives to the model"),
)
"""name, value, when, why."""


# Sources: NCCL's list of environment variables (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html) for names,
# defaults and subsystems; NVIDIA/nccl#864 for memory that grows with the number of channels.
PURPOSES: dict[str, tuple[Variable, ...]] = {
    "nccl_debug": (
        Variable("NCCL_DEBUG", "INFO", "nccl_debug: what NCCL finds and chooses, in the log of each rank"),
        Variable(
            *("NCCL_DEBUG_SUBSYS", "INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING,RAS"),
            "nccl_debug: start, variables, NICs, topology, algorithms; not COLL, a line for every collective",
        ),
        Variable("NCCL_RAS_ENABLE", "1", "nccl_debug: `ncclras` on a node says which ranks hang (NCCL 2.24 and newer)"),
    ),
    "nccl_simple_ring": (
        Variable("NCCL_ALGO", "Ring", "nccl_simple_ring: no trees, NVLS or CollNet, to compare with NCCL's own choice"),
        Variable("NCCL_PROTO", "Simple", "nccl_simple_ring: no LL and LL128, so that small messages are slower"),
    ),
    "nccl_low_memory": (
        Variable("NCCL_BUFFSIZE", "1048576", "nccl_low_memory: 1 MiB for each connection of a channel, not 4"),
        Variable("NCCL_MAX_CTAS", "8", "nccl_low_memory: at most 8 channels, to which the buffers are proportional"),
    ),
}
"""Variables for a purpose, by the option that asks for them, such as `with=nccl_debug`. They win over TABLE."""


def purposes(overrides: Iterable[str]) -> list[str]:
    """The names of PURPOSES among the `with=` of overrides, in their order."""
    texts = [text.removeprefix("with=") for text in overrides if text.startswith("with=")]
    names = [name.strip() for text in texts for name in text.split(",")]
    return [name for name in dict.fromkeys(names) if name in PURPOSES]


def sets_only(override: str) -> bool:
    """Whether an override is `with=` of purposes alone, and so changes nothing but the environment."""
    names = [name.strip() for name in override.removeprefix("with=").split(",")]
    return override.startswith("with=") and all(name in PURPOSES for name in names)


def refuse_in_configuration(options: str) -> None:
    """Refuse purposes among the options of a configuration, which holds no variables of its ranks.

    Raises:
        UserError: with the variables to set.
    """
    for name in purposes([f"with={options}"]):
        settings = " ".join(f"{v.name}={v.value}" for v in PURPOSES[name])
        raise UserError(
            f"{name} sets variables of the ranks, which a configuration does not hold",
            f"set {settings} where ranks start, or take with={name} of `recipes run`, submit, render and export",
        )


@dataclass(frozen=True)
class Contradiction:
    """A variable's value with which a run would end at its start."""

    name: str
    when: When
    refused: Callable[[str], bool]
    """of the value, "" where it is not set"""
    rule: str
    needed: str


CONTRADICTIONS = (
    Contradiction(
        "PYTORCH_CUDA_ALLOC_CONF",
        lambda j: j.options.cuda_graphs,
        lambda value: "expandable_segments:True" in value,
        "Megatron refuses expandable segments with CUDA graphs (megatron-core 0.15.3 transformer/cuda_graphs.py:1062)",
        "leave it unset, or drop cuda_graphs",
    ),
    Contradiction(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        lambda j: j.options.deterministic,
        lambda value: value != "0",
        "Megatron refuses a deterministic run without it (megatron-core 0.15.3 extensions/transformer_engine.py:940)",
        "set it to 0, or drop deterministic",
    ),
    Contradiction(
        "UB_SKIPMC",
        lambda j: userbuffers(j) and not j.node.gpu.multicast,
        lambda value: value != "1",
        "Transformer Engine refuses userbuffers on a GPU without multicast (TE 2.9 module/base.py:183)",
        "set it to 1, or the callback's tp_comm_overlap to False",
    ),
    Contradiction(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        own_fsdp,
        lambda value: value == "1",
        "with one queue the gathers of Megatron-FSDP wait for the layers that they should run beside",
        "set it to 8, or leave it unset",
    ),
)
"""What a user's own environment can break."""

CHECKED = tuple(rule.name for rule in CONTRADICTIONS)


def variables(job: PlannedJob, overrides: Iterable[str] = ()) -> list[Variable]:
    """What the ranks of a resolved run need on GPUs, in the order it is written; last the purposes of its overrides."""
    special = {v.name: v for name in purposes(overrides) for v in PURPOSES[name]}
    needed = [Variable(name, value, reason) for name, value, when, reason in TABLE if when(job)]
    return [v for v in needed if v.name not in special] + [*special.values()]


def with_own(needed: list[Variable], own: Mapping[str, str], reason: str, job: PlannedJob) -> list[Variable]:
    """`needed` with a user's own variables, which win, last; `reason` says where those come from.

    Raises:
        UserError: the job would end at its start with them.
    """
    require({v.name: v.value for v in needed} | dict(own), job)
    return [v for v in needed if v.name not in own] + [Variable(name, value, reason) for name, value in own.items()]


def require(environment: Mapping[str, str], job: PlannedJob) -> None:
    """Refuse an environment in which the job would end at its start.

    Raises:
        UserError: the variable, its value, the rule and the value that is needed.
    """
    for rule in CONTRADICTIONS:
        value = environment.get(rule.name, "")
        if rule.when(job) and rule.refused(value):
            raise UserError(f"{rule.name} is {value!r}: {rule.rule}", rule.needed)
