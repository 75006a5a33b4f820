"""Environment variables of the ranks for a GPU, layout, precision and options, each with a reason.

`recipes render` and `submit`, local runs and exported files call `variables`; a cluster adds its own variables
(`slurm/script/cluster_variables.py`). Does not import NeMo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from superpod.errors import UserError
from superpod.planner.planned_job import PlannedJob


@dataclass(frozen=True)
class Variable:
    """An environment variable of the ranks, and the reason for its value."""

    name: str
    value: str
    reason: str


When = Callable[[PlannedJob], bool]


def splits_layers(job: PlannedJob) -> bool:
    """Return whether ranks communicate within layers because of tensor or context parallelism."""
    return job.layout.tp > 1 or job.layout.cp > 1


def uses_megatron_fsdp(job: PlannedJob) -> bool:
    """Return whether Megatron-FSDP shards gradients or parameters."""
    return job.layout.sharding in ("zero2", "zero3")


def uses_userbuffers(job: PlannedJob) -> bool:
    """Return whether Transformer Engine's userbuffers overlap tensor-parallel communication."""
    return job.layout.tp > 1 and job.layout.sp and job.options.overlap_tp


# Sources: NeMo 2.7.3 `lightning/run/plugins.py` (PerfEnvPlugin) and `megatron_comm_overlap.py`; Megatron-Bridge
# `scripts/performance`; NCCL's and PyTorch's lists of variables. Requirements of a library have its file and line.
TABLE: tuple[tuple[str, str, When, str], ...] = (
    (
        *("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        lambda j: not j.node.gpu.keeps_queue_order and splits_layers(j) and not uses_megatron_fsdp(j),
        "kernels start in launch order: TP and CP communication before the GEMM that overlaps with it",
    ),
    (
        *("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
        lambda j: j.node.gpu.keeps_queue_order and splits_layers(j) and not uses_megatron_fsdp(j),
        "Blackwell keeps the launch order; with the default of 8 queues, streams of TP and CP would share one",
    ),
    (
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "8",
        uses_megatron_fsdp,
        "Megatron-FSDP rejects 1: its all-gathers must overlap with the layers",
    ),
    (
        *("UB_SKIPMC", "1"),
        lambda j: uses_userbuffers(j) and not j.node.gpu.multicast,
        "no NVLink multicast on this GPU: userbuffers use CUDA IPC (TE 2.9 module/base.py:183)",
    ),
    ("NVTE_FWD_LAYERNORM_SM_MARGIN", "16", lambda j: True, "SMs reserved for NCCL during norms, forward pass"),
    ("NVTE_BWD_LAYERNORM_SM_MARGIN", "16", lambda j: True, "SMs reserved for NCCL during norms, backward pass"),
    (
        *("NVTE_NORM_FWD_USE_CUDNN", "1"),
        lambda j: j.precision == "mxfp8",
        "only cuDNN fuses the norm with the cast to MXFP8",
    ),
    ("NVTE_NORM_BWD_USE_CUDNN", "1", lambda j: j.precision == "mxfp8", "the same in the backward pass"),
    (
        *("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"),
        lambda j: j.options.deterministic,
        "deterministic: attention reduces in a fixed order (megatron-core 0.15.3 extensions/transformer_engine.py:940)",
    ),
    (
        *("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        lambda j: j.options.deterministic,
        "deterministic: a cuBLAS workspace per stream (NVIDIA cuBLAS, results reproducibility)",
    ),
    (
        *("NCCL_ALGO", "^NVLS"),
        lambda j: j.options.deterministic,
        "deterministic: rings and trees reduce in a fixed order (Megatron-LM accepts this value)",
    ),
    (
        *("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        lambda j: not j.options.cuda_graphs,
        "less fragmentation, which has caused out-of-memory errors at 59 of 80 GB",
    ),
    ("TORCH_NCCL_HIGH_PRIORITY", "1", lambda j: True, "communication kernels take precedence over computation"),
    ("TORCH_FR_BUFFER_SIZE", "20000", lambda j: True, "flight recorder: keep the last collectives of each rank"),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", lambda j: True, "flight recorder: dump them when a collective times out"),
    ("NCCL_DEBUG", "WARN", lambda j: True, "errors name the peer; INFO would log megabytes per rank"),
    ("NCCL_NVLS_ENABLE", "0", lambda j: True, "NVLink SHARP needs GPU memory that the planner assigns to the model"),
)
"""Name, value, condition and reason of each variable."""


# Sources: NCCL's list of environment variables (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html) for names,
# defaults and subsystems; NVIDIA/nccl#864 for memory that grows with the number of channels.
OPTIONS: dict[str, tuple[Variable, ...]] = {
    "nccl_debug": (
        Variable("NCCL_DEBUG", "INFO", "nccl_debug: log NCCL's topology and algorithm choices on each rank"),
        Variable(
            *("NCCL_DEBUG_SUBSYS", "INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING,RAS"),
            "nccl_debug: init, variables, NICs, topology, algorithms; not COLL, which logs every collective",
        ),
        Variable("NCCL_RAS_ENABLE", "1", "nccl_debug: `ncclras` on a node lists hanging ranks (NCCL 2.24 and newer)"),
    ),
    "nccl_simple_ring": (
        Variable("NCCL_ALGO", "Ring", "nccl_simple_ring: no trees, NVLS or CollNet, for comparison with the default"),
        Variable("NCCL_PROTO", "Simple", "nccl_simple_ring: neither LL nor LL128; small messages are slower"),
    ),
    "nccl_low_memory": (
        Variable("NCCL_BUFFSIZE", "1048576", "nccl_low_memory: 1 MiB instead of 4 MiB per connection of a channel"),
        Variable("NCCL_MAX_CTAS", "8", "nccl_low_memory: at most 8 channels; buffer memory is proportional to them"),
    ),
}
"""Option of `with=`, such as nccl_debug -> its variables, which take precedence over `TABLE`."""


def environment_options(overrides: Iterable[str]) -> list[str]:
    """Return the options in `with=` overrides that are in `OPTIONS`, in order and without duplicates."""
    texts = [text.removeprefix("with=") for text in overrides if text.startswith("with=")]
    names = [name.strip() for text in texts for name in text.split(",")]
    return [name for name in dict.fromkeys(names) if name in OPTIONS]


def sets_only_environment(override: str) -> bool:
    """Return whether an override is `with=` with only names in `OPTIONS`, which do not change the configuration."""
    names = [name.strip() for name in override.removeprefix("with=").split(",")]
    return override.startswith("with=") and all(name in OPTIONS for name in names)


def refuse_in_configuration(options: str) -> None:
    """Raise UserError if the names in `options` include one that sets variables: a configuration contains none."""
    for name in environment_options([f"with={options}"]):
        settings = " ".join(f"{v.name}={v.value}" for v in OPTIONS[name])
        raise UserError(
            f"{name} sets environment variables of the ranks, but a configuration contains none",
            f"set {settings} for the ranks, or pass with={name} to `recipes run`, submit, render or export",
        )


@dataclass(frozen=True)
class Conflict:
    """A value of a variable with which some runs fail at startup."""

    name: str
    when: When
    refused: Callable[[str], bool]
    """Condition on the value, which is "" for an unset variable."""
    rule: str
    needed: str


CONFLICTS = (
    Conflict(
        "PYTORCH_CUDA_ALLOC_CONF",
        lambda j: j.options.cuda_graphs,
        lambda value: "expandable_segments:True" in value,
        "Megatron rejects expandable segments with CUDA graphs (megatron-core 0.15.3 transformer/cuda_graphs.py:1062)",
        "unset it, or omit cuda_graphs",
    ),
    Conflict(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        lambda j: j.options.deterministic,
        lambda value: value != "0",
        "deterministic runs require 0 in Megatron (megatron-core 0.15.3 extensions/transformer_engine.py:940)",
        "set it to 0, or omit deterministic",
    ),
    Conflict(
        "UB_SKIPMC",
        lambda j: uses_userbuffers(j) and not j.node.gpu.multicast,
        lambda value: value != "1",
        "on a GPU without multicast, userbuffers require 1 in Transformer Engine (TE 2.9 module/base.py:183)",
        "set it to 1, or set tp_comm_overlap=False in the overlap callback",
    ),
    Conflict(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        uses_megatron_fsdp,
        lambda value: value == "1",
        "with one queue, the all-gathers of Megatron-FSDP cannot overlap with computation",
        "set it to 8, or unset it",
    ),
)
"""Values of variables with which a job fails at startup."""

CHECKED_VARIABLES = tuple(rule.name for rule in CONFLICTS)


def variables(job: PlannedJob, overrides: Iterable[str] = ()) -> list[Variable]:
    """Return the environment variables of a job's ranks on GPUs; those of options in `overrides` come last."""
    optional = {v.name: v for name in environment_options(overrides) for v in OPTIONS[name]}
    required_variables = [Variable(name, value, reason) for name, value, when, reason in TABLE if when(job)]
    return [v for v in required_variables if v.name not in optional] + [*optional.values()]


def with_user_variables(
    required: list[Variable], user_variables: Mapping[str, str], reason: str, job: PlannedJob
) -> list[Variable]:
    """Return `required` with a user's variables, which take precedence. Raises UserError if the job would fail."""
    require({v.name: v.value for v in required} | dict(user_variables), job)
    return [v for v in required if v.name not in user_variables] + [
        Variable(name, value, reason) for name, value in user_variables.items()
    ]


def require(environment: Mapping[str, str], job: PlannedJob) -> None:
    """Raise UserError if a job would fail at startup with the given environment variables."""
    for rule in CONFLICTS:
        value = environment.get(rule.name, "")
        if rule.when(job) and rule.refused(value):
            raise UserError(f"{rule.name} is {value!r}: {rule.rule}", rule.needed)
