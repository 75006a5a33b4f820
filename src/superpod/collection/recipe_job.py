"""Convert a recipe to the planner's `PlannedJob`, without building the recipe and without NeMo."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from superpod.collection.declarations import ADAPTERS, Recipe
from superpod.collection.facts.adapters import adapter_rank, adapter_targets
from superpod.planner import columns, hardware, memory
from superpod.planner.hardware import Gpu, Hardware
from superpod.planner.layout import Layout
from superpod.planner.models import ModelShape
from superpod.planner.planned_job import Options, PlannedJob
from superpod.planner.rules import kernel_rules

NATIVE_LOSS = ("tiny", "hyena", "t5", "bert", "e5", "llama_embedding", "llama_reranker")
"""Name prefixes of models that train on CPUs, or whose classes have an unfused or a custom loss."""

FP8_GATHER_PRECISIONS = ("fp8ds", "fp8cs", "mxfp8")
"""Precisions in which the distributed optimizer gathers FP8 parameters. Blockwise scales cannot be sharded."""


def gathers_fp8(precision: str, sharding: str) -> bool:
    """Return whether sharded parameters are stored and gathered in FP8, in half the bytes of BF16."""
    return precision in FP8_GATHER_PRECISIONS and sharding != "none"


def set_unfused_attention(job: PlannedJob) -> PlannedJob:
    """Return the job, with unfused attention if Transformer Engine has no other backend (latent attention on A100).

    Transformer Engine selects the backend automatically (utils.py:1100-1119), so NeMo's configuration does not show it.
    """
    if not kernel_rules.falls_back_to_unfused(job):
        return job
    return job.replace(options=replace(job.options, attention="unfused"))


def resolve_parameters(job: PlannedJob) -> PlannedJob:
    """Return an MXFP8 job with BF16 parameters if they fit in memory, else FP8 parameters; other jobs unchanged.

    FP8 parameters take 2 bytes each (row-wise and column-wise copies), and are gathered in the gradient buffer. To
    overlap this all-gather with the forward pass, Megatron expects the training loop to copy them to the buffer
    (megatron-core 0.15.3, core/optimizer/optimizer.py:575-579). NeMo 2.7.3 does not, and the weights would be zero from
    the first step on, so the all-gather must run after the step, without overlap. BF16 parameters take 4 bytes each,
    but their all-gather overlaps: where they fit, they are faster, by 4 % on average over the declared sizes.
    """
    *preferred, last = parameter_variants(set_unfused_attention(job))
    for variant in preferred:
        if (memory.reserved(variant, columns.from_job(variant)) <= memory.limit(variant)).all():
            return variant
    return last


def parameter_variants(job: PlannedJob) -> list[PlannedJob]:
    """Return the job with each parameter format that `resolve_parameters` chooses from, the faster one first.

    A layout search tries both, because a layout that is illegal or does not fit with one may work with the other.
    """
    if job.precision != "mxfp8" or not gathers_fp8(job.precision, job.layout.sharding):
        return [job]
    kinds = ({"fp8_params": False, "overlap_params": True}, {"fp8_params": True, "overlap_params": False})
    return [job.replace(options=replace(job.options, **kind)) for kind in kinds]


def overlaps_tp(task: str, precision: str, shape: ModelShape) -> bool:
    """Return whether Transformer Engine's userbuffers can overlap tensor-parallel communication.

    Userbuffers transfer the activations of sequence-parallel regions. They do not work with adapters on linear layers,
    nor with the small projections of latent attention (Megatron disables them). They do not support blockwise scales,
    and must be all FP8 or all BF16, but current scaling keeps the first and the last layer in BF16. The linear layers
    of cross attention have no buffer names, so Megatron-Core 0.15.3 rejects them (extensions/transformer_engine.py).
    """
    return not (task in ADAPTERS or shape.kv_lora or shape.cross_attention or precision in ("fp8bw", "fp8cs"))


def exchanges_heads(shape: ModelShape) -> bool:
    """Return whether context parallelism exchanges heads (cp_comm_type a2a).

    Transformer Engine 2.9 supports only this type for sliding windows and learned softmax offsets
    (context_parallel.py:3803-3829; utils.py:721-728).
    """
    return shape.sink or bool(shape.window and not shape.chunked and not shape.soft_capped)


def explain_no_packing(shape: ModelShape) -> str:
    """Return why a model does not support packed samples, or "" if it does."""
    if ignores_sample_ends(shape):
        return "NeMo 2.7.3 does not pass sample boundaries to it, so states and attention would cross them"
    if shape.soft_capped:
        return "NeMo 2.7.3's attention for this model does not support them"  # gemma2.py, Gemma2DotProductAttention
    if shape.sink:
        return "Transformer Engine 2.9 does not support them with learned softmax offsets"  # utils.py:704-713
    return ""


def ignores_sample_ends(shape: ModelShape) -> bool:
    """Return whether a model ignores sample boundaries in a sequence.

    NeMo's forward steps for Mamba, Mamba hybrids and Hyena drop the sample boundaries (NeMo 2.7.3, gpt/model/ssm.py:50
    and hyena.py:153). Because these models are causal, they can train on one padded sample per sequence.
    """
    return "mamba" in shape.kinds


def choose_loss_impl(name: str, task: str) -> Literal["native", "te"]:
    """Return `cross_entropy_fusion_impl` for a model and task. "te" works in place on the BF16 logits."""
    return "native" if task in ("lora", "dora") or name.startswith(NATIVE_LOSS) else "te"


def choose_moments(name: str, task: str, precision: str, sharding: str) -> Literal["fp32", "bf16"]:
    """Return the precision of Adam's moments: BF16 for the pretraining of DeepSeek V3 in BF16, else FP32.

    The paper uses BF16 (arXiv:2412.19437, section 3.3.3); NVIDIA's runs do only with BF16 weights (helpers.py:218).
    """
    return "bf16" if (name, task, precision, sharding) == ("deepseek_v3", "pretrain", "bf16", "zero1") else "fp32"


def uses_deepep(shape: ModelShape, gpu: Gpu, layout: Layout) -> bool:
    """Return whether DeepEP dispatches tokens to experts: for DeepSeek on Hopper, as in NeMo's recipes.

    On Blackwell, NVIDIA's runs use Megatron's all-to-all (pretrain_deepseek_v3.py:75), and NVIDIA's images build DeepEP
    for compute capability 9.0 only. The flex dispatcher needs more than one rank (token_dispatcher.py:1164).
    """
    return bool(shape.kv_lora) and gpu.deepep and layout.ep * (layout.etp or layout.tp) > 1


def default_options(task: str, precision: str, sharding: str, shape: ModelShape) -> Options:
    """Return the planner's options for a task, precision and sharding, before `resolve_parameters`."""
    return Options(
        fp8_params=gathers_fp8(precision, sharding),
        fused_loss=task not in ADAPTERS,
        loss_impl=choose_loss_impl(shape.name, task),
        moments=choose_moments(shape.name, task, precision, sharding),
        cp_comm="a2a" if exchanges_heads(shape) else "p2p",
        overlap_tp=overlaps_tp(task, precision, shape),
        permute_fusion=shape.is_moe,
        lora_targets=adapter_targets(shape, task),
        lora_rank=adapter_rank(shape) if task in ADAPTERS else Options.lora_rank,
    )


def options(recipe: Recipe, num_nodes: int | None = None) -> Options:
    """Return the planner's options for a recipe on `num_nodes` nodes (default: the smallest declared size)."""
    return job(recipe, num_nodes).options


def job(recipe: Recipe, num_nodes: int | None = None, *, facts: Hardware | None = None) -> PlannedJob:
    """Return the planner's job for a recipe on `num_nodes` nodes (default: the smallest declared size).

    `facts` are the hardware data; None for the built-in ones. Raises UserError if the recipe does not declare the size.
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
        options=default_options(recipe.task, recipe.precision, recipe.layout(size).sharding, recipe.shape),
    )
    deepep = uses_deepep(recipe.shape, node.gpu, planned.layout)
    return resolve_parameters(planned.replace(options=replace(planned.options, deepep=deepep)))
