"""`PlannedJob`: the input of the planner, one training run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_type_hints

from superpod.errors import UserError
from superpod.planner.hardware import PRECISIONS, Fabric, Node
from superpod.planner.layout import Layout
from superpod.planner.models import ModelShape, Split

Task = Literal["pretrain", "sft", "lora"]
MAX_COUNT = 2**40
"""Maximum of counts such as GPUs; a larger value is a typo."""


@dataclass(frozen=True)
class Options:
    """Settings of a run that are not part of its layout. The defaults are those of this project's recipes."""

    framework: Literal["megatron", "fsdp2", "deepspeed"] = "megatron"
    """megatron = Megatron-Core (NeMo, Megatron-Bridge); fsdp2 = PyTorch FSDP2 (torchtitan, Automodel)."""
    release: str = ""
    """Software release, such as `NeMo 25.09` or `mcore 0.11`; "" = the pinned versions."""
    grads: Literal["fp32", "bf16"] = "fp32"
    """Data type of main gradients (grad_reduce_in_fp32)."""
    moments: Literal["fp32", "bf16", "fp8"] = "fp32"
    """Data type of Adam's moments (exp_avg_dtype of the precision-aware optimizer)."""
    offload: float = 0.0
    """Fraction of the optimizer states in host memory (optimizer_offload_fraction)."""
    unquantised: Literal["bf16", "fp32"] = "bf16"
    """With FP8 or FP4: precision of unquantized operations."""
    fp8_params: bool = False
    """fp8_param_gather: parameters are stored in FP8."""
    attention: Literal["flash", "fused", "unfused", "local"] = "flash"
    """attention_backend; unfused and local store the attention scores."""
    impl: Literal["te", "local"] = "te"
    """transformer_impl"""
    fused_loss: bool = True
    """cross_entropy_loss_fusion"""
    loss_impl: Literal["native", "te"] = "native"
    """cross_entropy_fusion_impl: te works in place on the BF16 logits."""
    cp_comm: Literal["p2p", "a2a", "all_gather"] = "p2p"
    """cp_comm_type: how context parallelism exchanges keys and values."""
    grad_fusion: bool = True
    """gradient_accumulation_fusion: the weight-gradient GEMM accumulates into the main gradients."""
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    capacity: float | None = None
    """moe_expert_capacity_factor; None = dropless."""
    grouped_gemm: bool = True
    """moe_grouped_gemm; otherwise, experts run sequentially."""
    permute_fusion: bool = False
    """moe_permute_fusion: Transformer Engine's kernel sorts tokens by expert."""
    fused_grouped_mlp: bool = False
    """Gated experts in MXFP8 are one kernel (Megatron-Bridge 26.06, cutedsl_fused_grouped_mlp)."""
    deepep: bool = False
    """moe_enable_deepep, or HybridEP: a token is sent once per rank and NVLink domain with some of its experts; with
    all-to-all, once per expert."""
    imbalance: float = 1.0
    """Tokens of the most loaded expert-parallel rank relative to the mean; 1 = balanced."""
    lora_rank: int = 32
    lora_dropout: float = 0.0
    """Dropout of an adapter's input."""
    lora_targets: tuple[str, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Pipeline schedule; 1f1b is interleaved if vp is set."""
    overlap_grads: bool = True
    """overlap_grad_reduce"""
    overlap_params: bool = True
    """overlap_param_gather"""
    overlap_p2p: bool = True
    """overlap_p2p_comm, which NeMo's callback enables if vp is set."""
    overlap_tp: bool = True
    """tp_comm_overlap: Transformer Engine's userbuffers."""
    overlap_experts: bool = False
    """overlap_moe_expert_parallel_comm: dispatch of one micro-batch overlaps computation of another."""
    cuda_graphs: bool = False
    memory_cap: float | None = None
    """GiB that a rank may reserve; None = all of the GPU's memory."""
    optimizer_instances: int = 1
    """num_distributed_optimizer_instances: groups of data-parallel ranks over which optimizer states are sharded."""
    microbatch_group: int = 0
    """microbatch_group_size_per_vp_stage; 0 = pp."""
    deterministic: bool = False
    """Bitwise reproducible: CUBLAS_WORKSPACE_CONFIG=:4096:8 and deterministic algorithms only."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            expected = _expected_if_invalid(value, _HINTS[f.name], f.default)
            if expected:
                raise UserError(f"{f.name} must be {expected}, not {value!r}")
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise UserError(f"{name} must be between {least:g} and {most:g}, not {value}")


_HINTS = get_type_hints(Options)
RANGES = {
    "offload": (0, 1),
    "hidden_dropout": (0, 1),
    "attention_dropout": (0, 1),
    "lora_dropout": (0, 1),
    "capacity": (0.01, 1000),
    "imbalance": (1, 1000),
    "lora_rank": (1, 2**16),
    "memory_cap": (1e-3, 1e6),
    "optimizer_instances": (1, 2**16),
}
"""Limits of options that are fractions, factors or counts."""


def describe_values(name: str) -> tuple[str, tuple[str, ...]]:
    """Return (phrase that describes the valid values of an option, the values), () if they cannot be enumerated."""
    default, choices = getattr(Options, name), get_args(_HINTS[name])
    if isinstance(default, bool):
        return "true or false", ("true", "false")
    if isinstance(default, str):
        return (f"one of {', '.join(choices)}", choices) if choices else ("a string", ())
    return "an integer" if isinstance(default, int) else "a number", ()


def _expected_if_invalid(value: object, hint: Any, default: object) -> str:
    """Return a phrase for the valid values of an option with this type hint and default; "" if `value` is valid."""
    if isinstance(default, str):
        choices = get_args(hint)
        is_valid = isinstance(value, str) and (not choices or value in choices)
        expected = f"one of {', '.join(choices)}" if choices else "a string"
    elif isinstance(default, bool):
        is_valid, expected = isinstance(value, bool), "true or false"
    elif isinstance(default, tuple):
        is_valid = isinstance(value, tuple) and all(isinstance(item, str) for item in value)
        expected = "a tuple of strings"
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        is_valid, expected = math.isfinite(value) and 0 <= value < MAX_COUNT, "a finite number of at least 0"
    else:
        is_valid, expected = value is None and default is None, "a number"
    return "" if is_valid else expected


@dataclass(frozen=True)
class PlannedJob:
    """A training run: model, hardware, layout and options. It can be illegal; `legality.violations` checks it."""

    model: ModelShape
    node: Node
    fabric: Fabric
    gpus: int
    seq: int
    """Sequence length in tokens."""
    precision: str
    """One of `hardware.PRECISIONS`, or `fp8` with unknown scaling."""
    layout: Layout
    task: Task = "pretrain"
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        for name in ("gpus", "seq"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MAX_COUNT:
                raise UserError(f"{name} must be an integer between 1 and {MAX_COUNT:,}, not {value!r}")
        if self.precision not in (*PRECISIONS, "fp8"):
            raise UserError(f"precision must be one of {', '.join(PRECISIONS)}, not {self.precision!r}")
        if self.task not in get_args(Task):
            raise UserError(f"task must be one of {', '.join(get_args(Task))}, not {self.task!r}")
        for name, kind in (("model", ModelShape), ("node", Node), ("layout", Layout), ("options", Options)):
            if not isinstance(getattr(self, name), kind):
                raise UserError(f"{name} must be of type {kind.__name__}, not {getattr(self, name)!r}")

    @property
    def dp(self) -> int:
        """Data-parallel size, GPUs / (tp x pp x cp). Raises UserError if that is not an integer."""
        return self.layout.dp(self.gpus)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per step on each data-parallel rank."""
        return self.layout.micro_batches(self.gpus)

    @property
    def tokens(self) -> int:
        """Number of tokens per global batch."""
        return self.layout.gbs * self.seq

    @property
    def split(self) -> Split:
        """The partition of layers and parameters over ranks."""
        return Split.from_layout(self.layout)

    @property
    def keeps_scores(self) -> bool:
        """Whether attention stores the scores of all pairs of tokens; fused kernels do not."""
        o = self.options
        # NeMo 2.7.3, gemma2.py: Gemma2DotProductAttention
        uses_nemo_attention = self.model.soft_capped and o.framework == "megatron"
        return uses_nemo_attention or o.attention in ("unfused", "local") or o.impl == "local"

    def has_separate_norm(self, block: str) -> bool:
        """Return whether the norm before a kind of block is a separate module, which can be recomputed selectively.

        Transformer Engine fuses the norm with the following linear layer (megatron gpt_layer_specs.py), except before a
        router and before the down projections of latent attention.
        """
        return self.options.impl == "local" or block in ("mla", "moe")

    def replace(self, **changes: Any) -> PlannedJob:
        """Return a copy with some fields changed."""
        return replace(self, **changes)
