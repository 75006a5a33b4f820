"""`Job`: one training run to be judged and costed; everything that the planner needs to know about it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from superpod.planner.hardware import Fabric, Node
from superpod.planner.layout import Layout
from superpod.planner.models import Model, Split

Task = Literal["pretrain", "sft", "lora"]


@dataclass(frozen=True)
class Options:
    """What a run decides beside its layout. The defaults are those of this project's recipes."""

    framework: Literal["megatron", "fsdp2", "deepspeed"] = "megatron"
    """megatron = Megatron-Core (NeMo, Megatron-Bridge); fsdp2 = PyTorch's own (torchtitan, Automodel)."""
    release: str = ""
    """The software's release as published, `NeMo 25.09`; "" = the one that is pinned here."""
    grads: Literal["fp32", "bf16"] = "fp32"
    """Main gradients: grad_reduce_in_fp32."""
    moments: Literal["fp32", "bf16", "fp8"] = "fp32"
    """exp_avg_dtype of the precision-aware optimizer."""
    offload: float = 0.0
    """Share of the optimizer's states that lie in host memory (optimizer_offload_fraction)."""
    unquantised: Literal["bf16", "fp32"] = "bf16"
    """With FP8 or FP4: what everything else is in."""
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
    cuda_graphs: bool = False
    optimizer_instances: int = 1
    """num_distributed_optimizer_instances: each of so many parts of data parallelism shards the optimizer by itself."""
    microbatch_group: int = 0
    """microbatch_group_size_per_vp_stage; 0 = pp."""
    deterministic: bool = False
    """Bitwise repeatable: CUBLAS_WORKSPACE_CONFIG=:4096:8, and no algorithm that is not."""


@dataclass(frozen=True)
class Job:
    """A run: what is trained, on what, how it is laid out. Plain facts; `violations(job)` says whether it is legal."""

    model: Model
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

    @property
    def dp(self) -> int:
        """Data-parallel size: what the world leaves over. Raises UserError where it leaves a rest."""
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
        return Split.of(self.layout)

    def replace(self, **changes: Any) -> Job:
        """A copy with some fields changed."""
        return replace(self, **changes)
