"""Rules of sequence length, precision, recomputation and sharding, in the form of `rules.py`.

The comment beside a rule names the function of megatron-core 0.15.3 that enforces it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.planner.rules.family_rules import FAMILY
from superpod.planner.rules.kernel_rules import KERNELS
from superpod.planner.rules.rules import JobInputs, Rule, near_multiples

if TYPE_CHECKING:
    from superpod.planner.arrays import Boolean
    from superpod.planner.planned_job import PlannedJob

FP8 = ("fp8", "fp8ds", "fp8cs", "fp8bw", "mxfp8")


def applicable_rules(job: PlannedJob) -> tuple[Rule[JobInputs], ...]:
    """The rules of every framework, those of Megatron-Core, and those that only its pinned release has."""
    if job.options.framework != "megatron":
        return GENERAL
    return (*GENERAL, *MEGATRON) if job.options.release else (*GENERAL, *MEGATRON, *PINNED, *FAMILY, *KERNELS)


def _split_unevenly(f: JobInputs) -> Boolean:
    """Whether uniform recomputation's groups of layers do not fill some model chunk."""
    rest: Boolean = False
    for size in f.chunk_sizes:
        rest = rest | (size % f.recompute_layers != 0)
    return rest


def _no_precision(f: JobInputs) -> tuple[str, str]:
    gpu = f.job.node.gpu
    return f"{gpu.name} ({gpu.generation}) has no {f.job.precision}", f"it has {', '.join(gpu.precisions)}"


def _cap_beyond(job: PlannedJob) -> bool:
    """Whether the run's own memory cap is more than the GPU has."""
    cap = job.options.memory_cap
    return cap is not None and cap > job.node.gpu.hbm_usable_gib


def _has_precision(job: PlannedJob) -> bool:
    gpu = job.node.gpu
    return job.precision in gpu.precisions or (job.precision == "fp8" and gpu.fp8_tflops > 0)


def _own_attention(job: PlannedJob) -> bool:
    """Whether attention is Megatron's own DotProductAttention, not Transformer Engine's."""
    return job.options.impl == "local" or job.options.attention == "local"


def _frozen_down(job: PlannedJob) -> bool:
    """Whether adapters leave latent attention's down projections frozen, as DoRA does (collection/declarations.py)."""
    small = {"linear_q_down_proj", "linear_kv_down_proj"}
    return job.task == "lora" and bool(job.model.kv_lora) and not small & set(job.options.lora_targets)


def _splits_groups(f: JobInputs) -> Boolean:
    """Mamba under context parallelism: heads by tp x cp, and groups by cp or cp by groups."""
    m = f.model
    if "mamba" not in m.kinds:
        return False
    groups = m.mamba_groups // f.tp
    groups = groups + (groups == 0)
    fits = (groups % f.cp == 0) | ((groups < f.cp) & (f.cp % groups == 0))
    return (f.cp > 1) & ((m.mamba_heads % (f.tp * f.cp) != 0) | (fits == 0))


GENERAL: tuple[Rule[JobInputs], ...] = (
    Rule("layers", lambda f: f.unpartitionable, lambda f: f.why_unpartitionable),  # get_num_layers_to_build
    Rule("precision", lambda f: not _has_precision(f.job), _no_precision),  # hardware.Gpu.precisions
    Rule(
        "memory_cap",
        lambda f: _cap_beyond(f.job),
        lambda f: (
            f"a memory cap of {f.job.options.memory_cap:g} GiB is more than {f.job.node.gpu.name} has, "
            f"{f.job.node.gpu.hbm_usable_gib:.1f} GiB",
            f"at most {f.job.node.gpu.hbm_usable_gib:.1f}, or leave it out",
        ),
    ),
)
"""Rules of any framework."""


def _combines_nothing(f: JobInputs) -> Boolean:
    """Whether Megatron's schedule that joins one micro-batch's dispatch to another's computation refuses a run."""
    plain = f.job.precision in ("fp32", "tf32") or f.model.mtp_layers > 1
    return (f.ep == 1) | (f.recompute == 2) | (f.pp > 1) & (f.vp == 1) | plain


MEGATRON: tuple[Rule[JobInputs], ...] = (
    Rule(
        "seq_cp",  # utils.get_batch_on_this_cp_rank: an early and a late chunk for every rank
        lambda f: (f.cp > 1) & (f.job.seq % (2 * f.cp) != 0),
        lambda f: (
            f"context parallelism cuts the sequence into 2 x cp {f.cp} = {2 * f.cp} chunks, and seq is {f.job.seq}",
            f"nearest: seq {near_multiples(2 * f.cp, f.job.seq)}",
        ),
    ),
    Rule(
        "seq_tp",  # tensor_parallel.mappings._split_along_first_dim
        lambda f: f.sp & (f.job.seq % (f.tp * f.cp) != 0),
        lambda f: (
            f"sequence parallelism cuts the sequence into tp {f.tp} x cp {f.cp} = {f.tp * f.cp} parts, "
            f"and seq is {f.job.seq}",
            f"nearest: seq {near_multiples(f.tp * f.cp, f.job.seq)}, or drop sp",
        ),
    ),
    Rule(
        "experts_sp",  # MoELayer.forward; ModelParallelConfig.__post_init__ where ep is above 1
        lambda f: (f.tp > 1) & (f.sp == 0) & ((f.ep > 1) | ("moe" in f.model.kinds)),
        lambda f: (f"experts with tp {f.tp} need sequence parallelism", "set sp, or tp 1"),
    ),
    Rule(
        "cp_attention",  # DotProductAttention.__init__; of TE's backends, unfused has no context parallelism
        lambda f: (f.cp > 1) & (f.job.options.impl == "local" or f.job.options.attention in ("unfused", "local")),
        lambda f: (
            f"context parallelism (cp {f.cp}) needs Transformer Engine's flash or fused attention, and this is "
            f"{f.job.options.attention} of {f.job.options.impl}",
            "set cp 1, or attention flash",
        ),
    ),
    Rule(
        "vp_p2p",  # wrong gradients without an error: docs/rehearsal.md
        lambda f: f.interleaved & (f.pp == 2) & (not f.job.options.overlap_p2p),
        lambda f: (
            f"vp {f.vp} with pp 2 and without overlapped p2p sends twice between the same two ranks at once, "
            "and the gradients are silently wrong",
            "set overlap_p2p, or pp 4, or drop vp",
        ),
    ),
    Rule(
        "recompute_groups",  # TransformerBlock._checkpointed_forward, uniform: the last group must be whole
        lambda f: (f.recompute == 2) & (f.recompute_block == 0) & (not f.model.pattern) & _split_unevenly(f),
        lambda f: (
            f"uniform recomputation in groups of {f.recompute_layers} layers does not fill model chunks of "
            f"{', '.join(map(str, sorted(f.chunk_sizes)))} layers",
            "set recompute_layers 1, or recompute_method block",
        ),
    ),
    Rule(
        "recompute_mtp",  # MultiTokenPredictionLayer._checkpointed_forward
        lambda f: (f.recompute == 2) & (f.recompute_block == 0) & (f.recompute_layers > 1) & (f.model.mtp_layers > 0),
        lambda f: (
            f"uniform recomputation of multi-token prediction takes recompute_layers 1, not {f.recompute_layers}",
            "set recompute_layers 1",
        ),
    ),
    Rule(
        "mla_attention",  # MLASelfAttention gives its core attention arguments that DotProductAttention does not take
        lambda f: bool(f.model.kv_lora) and _own_attention(f.job),
        lambda f: (
            "multi-latent attention needs Transformer Engine's attention, and this is Megatron's own (local)",
            "set attention flash, and impl te",
        ),
    ),
    Rule(
        "recompute_mla",  # TransformerConfig.__post_init__
        lambda f: f.recomputes("mla_up_proj") & (not f.model.kv_lora),
        lambda f: (
            "mla_up_proj is recomputed in multi-latent attention only, and this model has none",
            "drop mla_up_proj from recompute_modules",
        ),
    ),
    Rule(
        "recompute_experts",  # TransformerConfig.__post_init__: moe_act needs grouped products
        lambda f: f.recomputes("moe_act") & (f.model.experts == 0),
        lambda f: (
            "moe_act is recomputed in experts only, and this model has none",
            "drop moe_act from recompute_modules",
        ),
    ),
    Rule(
        "recompute_delayed",  # TransformerConfig.__post_init__
        lambda f: f.recomputes("moe_act", "layernorm") & (f.job.precision == "fp8ds"),
        lambda f: (
            "delayed scaling (fp8ds) does not take recomputation of moe_act or layernorm",
            "drop them from recompute_modules, or set precision fp8cs",
        ),
    ),
    Rule(
        "recompute_graphs",  # TransformerConfig.__post_init__
        lambda f: (f.recompute == 2) & f.job.options.cuda_graphs,
        lambda f: ("CUDA graphs do not take full recomputation", "set recompute selective, or drop cuda_graphs"),
    ),
    Rule(
        "overlap_experts",  # TransformerConfig.__post_init__
        lambda f: f.job.options.overlap_experts & _combines_nothing(f),
        lambda f: (
            f"overlap_experts wants ep above 1, vp where pp is above 1, BF16 or FP16 beside what is quantised, no full "
            f"recomputation and one MTP layer at most: ep is {f.ep}, pp {f.pp}, vp {f.vp}",
            "change these, or drop overlap_experts",
        ),
    ),
    Rule(
        "fp8_params",  # TransformerConfig.__post_init__
        lambda f: f.job.options.fp8_params and f.job.precision not in (*FP8, *("nvfp4",) * bool(f.job.options.release)),
        lambda f: (f"fp8_params keeps parameters in FP8, and the precision is {f.job.precision}", "drop fp8_params"),
    ),
    Rule(
        "moments",  # OptimizerConfig.__post_init__: the precision-aware optimizer is a distributed one
        lambda f: (f.sharding == 0) & (f.job.options.moments != "fp32"),
        lambda f: (f"moments in {f.job.options.moments} need the distributed optimizer", "set sharding zero1"),
    ),
    Rule(
        "zero2_overlap",  # MegatronFSDP.__init__; zero3 switches the overlap on by itself
        lambda f: (f.sharding == 2) & (not f.job.options.overlap_grads),
        lambda f: ("zero2 of Megatron-FSDP reduces gradients while it computes", "set overlap_grads, or zero3"),
    ),
    Rule(
        "mamba_cp",  # MambaContextParallel.__init__
        _splits_groups,
        lambda f: (
            f"cp {f.cp} must divide the {f.model.mamba_heads} Mamba heads / tp {f.tp}, and divide or be divided by "
            f"the {f.model.mamba_groups} groups / tp {f.tp}",
            "set cp 1",
        ),
    ),
)
"""Rules of Megatron-Core."""

PINNED: tuple[Rule[JobInputs], ...] = (
    Rule(
        "fsdp_experts",  # mcore_fsdp_adapter._init_dist_index gives no expert group, and MegatronFSDP refuses
        lambda f: (f.sharding >= 2) & (f.ep > 1) & ("moe" in f.model.kinds),
        lambda f: (
            f"Megatron-FSDP (zero2, zero3) of megatron-core 0.15 takes no expert parallelism, and ep is {f.ep}",
            "set sharding zero1, or ep 1",
        ),
    ),
    Rule(
        "both_ends_vp",  # get_transformer_layer_offset divides by the number of stages between them
        lambda f: f.both_ends & f.interleaved & (f.pp == 2),
        lambda f: (
            f"vp {f.vp} with first_layers and last_layers needs a stage between them, and pp is 2",
            "give one of them, or chunks",
        ),
    ),
    Rule(
        "fsdp_pipeline",  # mcore_fsdp_adapter._get_dp_tp_mesh is a mesh of the whole world
        lambda f: (f.sharding >= 2) & (f.pp > 1),
        lambda f: (
            f"Megatron-FSDP (zero2, zero3) of megatron-core 0.15 takes no pipeline parallelism, and pp is {f.pp}",
            "set sharding zero1, or pp 1",
        ),
    ),
    Rule(
        "recompute_mtp_block",  # MultiTokenPredictionLayer._checkpointed_forward: NameError, a module not imported
        lambda f: (f.recompute == 2) & (f.recompute_block == 1) & (f.model.mtp_layers > 0),
        lambda f: (
            "the block method of recomputation fails with multi-token prediction in megatron-core 0.15",
            "set recompute_method uniform",
        ),
    ),
    Rule(
        "adapters_vp",  # NeMo 2.7.3, WrappedAdapterIO.save_checkpoint: chunks are called model_0, model_1 (measured)
        lambda f: f.interleaved & (f.job.task == "lora"),
        lambda f: (
            f"vp {f.vp} with adapters: NeMo 2.7.3 leaves the adapters of interleaved stages out of its checkpoints",
            "drop vp",
        ),
    ),
    Rule(
        "recompute_frozen",  # a checkpointed layer passes gradients on only if its input takes one (measured)
        lambda f: (f.recompute == 2) & (f.job.task == "lora"),
        lambda f: (
            "adapters take no full recomputation in megatron-core 0.15: what the frozen embeddings give takes no "
            "gradient, so the recomputed layers behind them train nothing",
            "set recompute selective, or more tp, pp or cp",
        ),
    ),
    Rule(
        "recompute_frozen_norm",  # CheckpointWithoutOutput keeps nothing of an input without gradient (measured)
        lambda f: f.recomputes("layernorm") & bool(f.model.kv_lora) & (f.job.task == "lora"),
        lambda f: (
            "adapters take no recomputed layernorm in front of latent attention in megatron-core 0.15: what the frozen "
            "embeddings give takes no gradient, and the backward pass of the first layer fails",
            "drop layernorm from recompute_modules",
        ),
    ),
    Rule(
        "recompute_frozen_up",  # CheckpointWithoutOutput too: only an input with a gradient passes one on (measured)
        lambda f: f.recomputes("mla_up_proj") & _frozen_down(f.job),
        lambda f: (
            "adapters of the up projections alone take no recomputed mla_up_proj in megatron-core 0.15: what the "
            "frozen down projections give takes no gradient, so the up projections of the first layers train nothing",
            "drop mla_up_proj from recompute_modules, or adapt linear_kv_down_proj",
        ),
    ),
    Rule(
        "mtp_alone",  # get_gpt_mtp_block_spec: layer_specs[-1] of the last chunk; the proof of the recipes found it
        lambda f: f.last_empty & (f.model.mtp_layers > 0),
        lambda f: (
            "the last stage has none of the layers, and megatron-core 0.15 builds multi-token prediction as its last",
            "give the last stage a layer: other chunks, or no loss_as_layer",
        ),
    ),
    Rule(
        "recompute_mlp_bias",  # CheckpointFunction makes the bias that MLP hands on its own output (measured)
        lambda f: f.recomputes("mlp") & bool(f.model.bias and "mlp" in f.model.kinds),
        lambda f: (
            "the backward pass of a recomputed mlp with biases calls itself without end in megatron-core 0.15",
            "drop mlp from recompute_modules, or recompute full",
        ),
    ),
)
"""Rules of the pinned release that later releases lifted."""
