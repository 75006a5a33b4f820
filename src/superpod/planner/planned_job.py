"""`PlannedJob`: everything that the planner needs to know about one training run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_type_hints

from superpod.errors import UserError
from superpod.planner.hardware import PRECISIONS, Fabric, Node
from superpod.planner.layout import Layout
from superpod.planner.models import ModelShape, Split

Task = Literal["pretrain", "sft", "lora"]
MOST = 2**40
"""Largest count; anything larger is a typing mistake."""


@dataclass(frozen=True)
class Options:
    """Settings of a run beside its layout. The defaults are those of this project's recipes."""

    framework: Literal["megatron", "fsdp2", "deepspeed"] = "megatron"
    """megatron = Megatron-Core (NeMo, Megatron-Bridge); fsdp2 = PyTorch's own (torchtitan, Automodel)."""
    release: str = ""
    """The software's release, `NeMo 25.09` or `mcore 0.11`; "" = the one that is pinned here. `era NAME` picks the
    factors of `data/calibration` by name; `, functional` after a release = a run that nobody tuned."""
    grads: Literal["fp32", "bf16"] = "fp32"
    """Main gradients: grad_reduce_in_fp32."""
    moments: Literal["fp32", "bf16", "fp8"] = "fp32"
    """exp_avg_dtype of the precision-aware optimizer."""
    offload: float = 0.0
    """Share of the optimizer's states that lie in host memory (optimizer_offload_fraction)."""
    unquantised: Literal["bf16", "fp32"] = "bf16"
    """With FP8 or FP4: the precision of everything else."""
    fp8_params: bool = False
    """fp8_param_gather: the parameters themselves are kept in FP8."""
    attention: Literal["flash", "fused", "unfused", "local"] = "flash"
    """attention_backend; unfused and local keep the scores."""
    impl: Literal["te", "local"] = "te"
    """transformer_impl"""
    fused_loss: bool = True
    """cross_entropy_loss_fusion"""
    loss_impl: Literal["native", "te"] = "native"
    """cross_entropy_fusion_impl: Transformer Engine's works in place on the BF16 logits."""
    cp_comm: Literal["p2p", "a2a", "all_gather"] = "p2p"
    """cp_comm_type: how context parallelism passes keys and values."""
    grad_fusion: bool = True
    """gradient_accumulation_fusion: weight gradients are added to the main gradients by the matrix product itself."""
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    capacity: float | None = None
    """moe_expert_capacity_factor; None = dropless."""
    grouped_gemm: bool = True
    """moe_grouped_gemm; without, one expert after the other."""
    deepep: bool = False
    """moe_enable_deepep, or HybridEP: a token travels once to each rank and to each NVLink domain that has experts of
    its own, where all-to-all sends it once for each expert."""
    imbalance: float = 1.0
    """Tokens of the busiest expert-parallel rank over the mean; 1 = forced or perfect balance."""
    lora_rank: int = 32
    lora_dropout: float = 0.0
    """Of an adapter's input."""
    lora_targets: tuple[str, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Of the pipeline; with vp it is the interleaved one."""
    overlap_grads: bool = True
    """overlap_grad_reduce"""
    overlap_params: bool = True
    """overlap_param_gather"""
    overlap_p2p: bool = True
    """overlap_p2p_comm, which NeMo's callback sets wherever there is a vp."""
    overlap_tp: bool = True
    """tp_comm_overlap: Transformer Engine's userbuffers."""
    overlap_experts: bool = False
    """overlap_moe_expert_parallel_comm: one micro-batch's dispatch beside another's computation."""
    cuda_graphs: bool = False
    memory_cap: float | None = None
    """GiB that a rank may reserve; None = what the GPU has."""
    optimizer_instances: int = 1
    """num_distributed_optimizer_instances: each of so many parts of data parallelism shards the optimizer by itself."""
    microbatch_group: int = 0
    """microbatch_group_size_per_vp_stage; 0 = pp."""
    deterministic: bool = False
    """Bitwise repeatable: CUBLAS_WORKSPACE_CONFIG=:4096:8, and no algorithm that is not."""

    def __post_init__(self) -> None:
        for f in fields(self):
            if problem := _unfit(getattr(self, f.name), _HINTS[f.name], f.default):
                raise UserError(f"{f.name} takes {problem}, not {getattr(self, f.name)!r}")
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise UserError(f"{name} is {value}; it is {least:g} to {most:g}")


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
"""Limits of options that are shares, factors or counts."""


def takes(name: str) -> tuple[str, tuple[str, ...]]:
    """What an option takes, in words, and its values where they are few."""
    default, choices = getattr(Options, name), get_args(_HINTS[name])
    if isinstance(default, bool):
        return "true or false", ("true", "false")
    if isinstance(default, str):
        return (f"one of {', '.join(choices)}", choices) if choices else ("a string", ())
    return "a whole number" if isinstance(default, int) else "a number", ()


def _unfit(value: object, hint: Any, default: object) -> str:
    """What an option takes, if the value does not fit it; "" if it does."""
    choices = get_args(hint) if isinstance(default, str) else ()
    if choices or isinstance(default, str):
        fits = isinstance(value, str) and (not choices or value in choices)
        return "" if fits else f"one of {', '.join(choices)}" if choices else "a string"
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, tuple):
        whole = isinstance(value, tuple) and all(isinstance(item, str) for item in value)
        return "" if whole else "a tuple of strings"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "" if math.isfinite(value) and 0 <= value < MOST else "a finite number, 0 or more"
    return "" if value is None and default is None else "a number"


@dataclass(frozen=True)
class PlannedJob:
    """A run: model, hardware, layout, options. Not every one is legal: `legality.violations(job)`."""

    model: ModelShape
    node: Node
    fabric: Fabric
    gpus: int
    seq: int
    """Sequence length, tokens."""
    precision: str
    """Of `hardware.PRECISIONS`; `fp8` = a kind that is not known."""
    layout: Layout
    task: Task = "pretrain"
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        for name in ("gpus", "seq"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MOST:
                raise UserError(f"{name} is {value!r}; it is a whole number, 1 to {MOST:,}")
        if self.precision not in (*PRECISIONS, "fp8"):
            raise UserError(f"precision is {self.precision!r}; it is one of {', '.join(PRECISIONS)}")
        if self.task not in get_args(Task):
            raise UserError(f"task is {self.task!r}; it is one of {', '.join(get_args(Task))}")
        for name, kind in (("model", ModelShape), ("node", Node), ("layout", Layout), ("options", Options)):
            if not isinstance(getattr(self, name), kind):
                raise UserError(f"{name} is {getattr(self, name)!r}; it is a {kind.__name__}")

    @property
    def dp(self) -> int:
        """Data-parallel size: GPUs over tp x pp x cp. Raises UserError where that does not divide."""
        return self.layout.dp(self.gpus)

    @property
    def micro_batches(self) -> int:
        """Micro-batches each data-parallel rank runs per step."""
        return self.layout.micro_batches(self.gpus)

    @property
    def tokens(self) -> int:
        """Tokens of a global batch."""
        return self.layout.gbs * self.seq

    @property
    def split(self) -> Split:
        """Which layers and which part of them a rank holds."""
        return Split.from_layout(self.layout)

    @property
    def keeps_scores(self) -> bool:
        """Whether attention computes and keeps a score for every pair of tokens, as all but fused kernels do."""
        o = self.options
        own = self.model.soft_capped and o.framework == "megatron"  # NeMo 2.7.3, gemma2.py: Gemma2DotProductAttention
        return own or o.attention in ("unfused", "local") or o.impl == "local"

    def has_separate_norm(self, block: str) -> bool:
        """Whether the norm before a block is a module of its own, which selective recomputation can drop.

        Transformer Engine fuses it with the product that follows (megatron gpt_layer_specs.py), except before a router
        and before latent attention's small projections.
        """
        return self.options.impl == "local" or block in ("mla", "moe")

    def replace(self, **changes: Any) -> PlannedJob:
        """A copy with some fields changed."""
        return replace(self, **changes)
