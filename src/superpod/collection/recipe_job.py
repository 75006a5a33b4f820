"""A recipe as the planner's `PlannedJob`, by its facts alone: it is not built, and NeMo is not needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from superpod.collection.declarations import ADAPTERS, Recipe
from superpod.collection.facts.adapted_layers import adapted
from superpod.planner import columns, hardware, memory
from superpod.planner.hardware import Gpu, Hardware
from superpod.planner.layout import Layout
from superpod.planner.models import ModelShape
from superpod.planner.planned_job import Options, PlannedJob
from superpod.planner.rules import kernel_rules

NATIVE_LOSS = ("tiny", "hyena", "t5", "bert", "e5", "llama_embedding", "llama_reranker")
"""Models, by how their names begin, that train on CPUs, or whose classes leave the loss unfused or have another one."""

GATHERED = ("fp8ds", "fp8cs", "mxfp8")
"""Formats in which the distributed optimizer gathers parameters as FP8; blockwise scales cannot be sharded."""


def gathers_fp8(precision: str, sharding: str) -> bool:
    """Whether parameters are kept and gathered in FP8, half the bytes of BF16; without sharding nothing is gathered."""
    return precision in GATHERED and sharding != "none"


def with_attention(job: PlannedJob) -> PlannedJob:
    """The job with its scores in memory where Transformer Engine has no other attention for it: latent attention on
    A100. It takes the unfused one by itself (utils.py:1100-1119), so NeMo's configuration says nothing of it.
    """
    if not kernel_rules.falls_back_to_unfused(job):
        return job
    return job.replace(options=replace(job.options, attention="unfused"))


def settled(job: PlannedJob) -> PlannedJob:
    """The job with its choice of what MXFP8's parameters are: BF16 where memory holds them, else FP8.

    FP8 ones take 2 bytes instead of 4 (by rows and by columns), and lie in the gradients' buffer while they are
    gathered. Megatron then expects the training loop to copy them there when the gather is to run beside the forward
    pass (megatron-core 0.15.3, core/optimizer/optimizer.py:575-579). NeMo 2.7.3's does not: weights would be zero from
    the first step on, so that the gather must run by itself, after the step. BF16 ones are gathered beside the forward
    pass, as ever: faster wherever they fit, by 4 % in the mean of our sizes.
    """
    *wide, last = with_parameters(with_attention(job))
    within = (bool((memory.reserved(job, columns.from_job(job)) <= memory.limit(job)).all()) for job in wide)
    return next((job for job, fits in zip(wide, within, strict=True) if fits), last)


def with_parameters(job: PlannedJob) -> list[PlannedJob]:
    """The job with each kind of parameters that `settled` chooses from, the faster first; a search tries each of them:
    what does not fit with one kind, or is illegal, may do with the other.
    """
    if job.precision != "mxfp8" or not gathers_fp8(job.precision, job.layout.sharding):
        return [job]
    kinds = ({"fp8_params": False, "overlap_params": True}, {"fp8_params": True, "overlap_params": False})
    return [job.replace(options=replace(job.options, **kind)) for kind in kinds]


def overlaps_tp(task: str, precision: str, shape: ModelShape) -> bool:
    """Whether Transformer Engine's userbuffers can hide tensor-parallel communication.

    Userbuffers exchange what sequence-parallel regions send. Adapters beside a linear layer interrupt that, as do the
    small projections of latent attention (Megatron switches it off). Userbuffers support no blockwise scales, and they
    are all FP8 or all BF16, whereas current scaling keeps the first and the last layer in BF16. The linear layers of
    cross attention name no buffers, and Megatron-Core 0.15.3 refuses them (extensions/transformer_engine.py).
    """
    return not (task in ADAPTERS or shape.kv_lora or shape.cross_attention or precision in ("fp8bw", "fp8cs"))


def passes_heads(shape: ModelShape) -> bool:
    """Whether context parallelism exchanges heads (cp_comm_type a2a): the only way that Transformer Engine 2.9 has for
    windows that slide and for a learned softmax (context_parallel.py:3803-3829; utils.py:721-728).
    """
    return shape.sink or bool(shape.window and not shape.chunked and not shape.soft_capped)


def refuses_packed(shape: ModelShape) -> str:
    """Why a model takes no packed samples; "" = it does."""
    if knows_no_ends(shape):
        return "NeMo 2.7.3 does not tell it where samples end: its states, and its attention, would run across them"
    if shape.soft_capped:
        return "NeMo 2.7.3's own attention for it refuses them"  # gemma2.py, Gemma2DotProductAttention.forward
    if shape.sink:
        return "Transformer Engine 2.9 has no attention for them with a learned softmax"  # utils.py:704-713
    return ""


def knows_no_ends(shape: ModelShape) -> bool:
    """Whether a model reads every sequence as one sample: NeMo's steps for Mamba, its hybrids and Hyena drop the ends
    of samples (NeMo 2.7.3, gpt/model/ssm.py:50 and hyena.py:153). Causal, they take one padded sample a sequence.
    """
    return "mamba" in shape.kinds


WIDE_RANK_FROM = 60e9
"""Parameters of a dense model from which adapters have rank 16."""


def adapter_rank(shape: ModelShape) -> int:
    """Rank of a model's adapters, as in NeMo 2.7.3's recipes: 8, or 16 from 70 billion parameters on (llama3_8b.py:305,
    llama3_70b.py:322); 32 where experts leave only the attention to be adapted (mixtral_8x7b.py:293).
    """
    if shape.is_moe:
        return 32
    return 16 if shape.parameters().total >= WIDE_RANK_FROM else 8


def loss_impl(name: str, task: str) -> Literal["native", "te"]:
    """cross_entropy_fusion_impl of a model in a task: Transformer Engine's works in place on the BF16 logits."""
    return "native" if task in ("lora", "dora") or name.startswith(NATIVE_LOSS) else "te"


def moments(name: str, task: str, precision: str, sharding: str) -> Literal["fp32", "bf16"]:
    """Precision of Adam's moments: BF16 for DeepSeek V3's pretraining (arXiv:2412.19437, section 3.3.3).

    Beside BF16 weights only, as NVIDIA's runs have it (helpers.py:218); FP8 parameters have other master copies.
    """
    return "bf16" if (name, task, precision, sharding) == ("deepseek_v3", "pretrain", "bf16", "zero1") else "fp32"


def uses_deepep(shape: ModelShape, gpu: Gpu, layout: Layout) -> bool:
    """Whether DeepEP's kernels send tokens to their experts: DeepSeek on Hopper, as NeMo's recipes have it.

    On Blackwell NVIDIA's runs take Megatron's own all-to-all (pretrain_deepseek_v3.py:75), and NVIDIA's images build
    DeepEP for compute capability 9.0. The flex dispatcher wants several ranks (token_dispatcher.py:1164).
    """
    return bool(shape.kv_lora) and gpu.deepep and layout.ep * (layout.etp or layout.tp) > 1


def decided(task: str, precision: str, sharding: str, shape: ModelShape) -> Options:
    """The planner's options that follow from a recipe's task, precision and sharding, before `settled`."""
    return Options(
        fp8_params=gathers_fp8(precision, sharding),
        fused_loss=task not in ADAPTERS,
        loss_impl=loss_impl(shape.name, task),
        moments=moments(shape.name, task, precision, sharding),
        cp_comm="a2a" if passes_heads(shape) else "p2p",
        overlap_tp=overlaps_tp(task, precision, shape),
        lora_targets=adapted(shape, task),
        lora_rank=adapter_rank(shape) if task in ADAPTERS else Options.lora_rank,
    )


def options(recipe: Recipe, num_nodes: int | None = None) -> Options:
    """Those of a recipe at a size."""
    return job(recipe, num_nodes).options


def job(recipe: Recipe, num_nodes: int | None = None, *, facts: Hardware | None = None) -> PlannedJob:
    """The run that a recipe describes at `num_nodes` (default: its smallest size), on its GPU's node and fabric.

    Raises:
        UserError: when the recipe does not declare that size.
    """
    facts = facts or hardware.builtin()
    size = recipe.nodes[0] if num_nodes is None else num_nodes
    node = facts.node(recipe.gpu)
    planned = PlannedJob(
        model=recipe.shape,
        node=node,
        fabric=facts.fabric_of(node),
        gpus=size * recipe.gpus_per_node,
        seq=recipe.seq,
        precision=recipe.precision,
        layout=recipe.layout(size),
        task="lora" if recipe.task == "dora" else recipe.task,
        options=decided(recipe.task, recipe.precision, recipe.layout(size).sharding, recipe.shape),
    )
    deepep = uses_deepep(recipe.shape, node.gpu, planned.layout)
    return settled(planned.replace(options=replace(planned.options, deepep=deepep)))
