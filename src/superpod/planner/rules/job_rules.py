"""Rules for sequence length, precision, recomputation and sharding, in the form of `rules.py`.

The comment next to a rule names the function of megatron-core 0.15.3 that enforces it.
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
    """Return the rules that apply to a job's framework and release, in addition to `rules.LAYOUT` and `rules.MODEL`."""
    if job.options.framework != "megatron":
        return GENERAL
    if job.options.release:
        return (*GENERAL, *MEGATRON)
    return (*GENERAL, *MEGATRON, *PINNED, *FAMILY, *KERNELS)


def _split_unevenly(f: JobInputs) -> Boolean:
    """Return whether recompute_layers does not divide the layers of a model chunk."""
    is_indivisible: Boolean = False
    for size in f.chunk_sizes:
        is_indivisible = is_indivisible | (size % f.recompute_layers != 0)
    return is_indivisible


def _explain_precision(f: JobInputs) -> tuple[str, str]:
    gpu = f.job.node.gpu
    message = f"{gpu.name} ({gpu.generation}) does not support {f.job.precision}"
    return message, f"supported: {', '.join(gpu.precisions)}"


def _supports_precision(job: PlannedJob) -> bool:
    """Return whether the GPU supports the precision; `fp8` means any FP8 scaling."""
    gpu = job.node.gpu
    return job.precision in gpu.precisions or (job.precision == "fp8" and gpu.fp8_tflops > 0)


def _freezes_down_projections(job: PlannedJob) -> bool:
    """Return whether LoRA or DoRA freezes the down projections of multi-latent attention (`adapter_targets`)."""
    down_projections = {"linear_q_down_proj", "linear_kv_down_proj"}
    return job.task == "lora" and bool(job.model.kv_lora) and not down_projections & set(job.options.lora_targets)


def _splits_mamba_heads_unevenly(f: JobInputs) -> Boolean:
    """Return whether Mamba's heads are not divisible by tp x cp, or neither of groups / tp and cp divides the other."""
    m = f.model
    if "mamba" not in m.kinds:
        return False
    groups = m.mamba_groups // f.tp
    groups = groups + (groups == 0)
    fits = (groups % f.cp == 0) | ((groups < f.cp) & (f.cp % groups == 0))
    return (f.cp > 1) & ((m.mamba_heads % (f.tp * f.cp) != 0) | (fits == 0))


GENERAL: tuple[Rule[JobInputs], ...] = (
    Rule("layers", lambda f: f.unpartitionable, lambda f: f.why_unpartitionable),  # get_num_layers_to_build
    Rule("precision", lambda f: not _supports_precision(f.job), _explain_precision),  # hardware.Gpu.precisions
    Rule(
        "memory_cap",
        lambda f: (f.job.options.memory_cap or 0) > f.job.node.gpu.hbm_usable_gib,
        lambda f: (
            f"the memory cap of {f.job.options.memory_cap:g} GiB exceeds the memory of {f.job.node.gpu.name}, "
            f"{f.job.node.gpu.hbm_usable_gib:.1f} GiB",
            f"set it to at most {f.job.node.gpu.hbm_usable_gib:.1f}, or omit it",
        ),
    ),
)
"""Rules for every framework."""


def _cannot_overlap_experts(f: JobInputs) -> Boolean:
    """Return whether a run violates a requirement of overlap_moe_expert_parallel_comm."""
    is_unsupported = f.job.precision in ("fp32", "tf32") or f.model.mtp_layers > 1
    return (f.ep == 1) | (f.recompute == 2) | (f.pp > 1) & (f.vp == 1) | is_unsupported


def _has_fp8_params_without_fp8(job: PlannedJob) -> bool:
    """Return whether fp8_params is set with a precision that has no FP8 parameters; later releases allow NVFP4."""
    supported_precisions = (*FP8, "nvfp4") if job.options.release else FP8
    return job.options.fp8_params and job.precision not in supported_precisions


MEGATRON: tuple[Rule[JobInputs], ...] = (
    Rule(
        "seq_cp",  # utils.get_batch_on_this_cp_rank: an early and a late chunk for every rank
        lambda f: (f.cp > 1) & (f.job.seq % (2 * f.cp) != 0),
        lambda f: (
            f"with context parallelism, seq must be a multiple of 2 x cp {f.cp} = {2 * f.cp}, not {f.job.seq}",
            f"nearest: seq {near_multiples(2 * f.cp, f.job.seq)}",
        ),
    ),
    Rule(
        "seq_tp",  # tensor_parallel.mappings._split_along_first_dim
        lambda f: f.sp & (f.job.seq % (f.tp * f.cp) != 0),
        lambda f: (
            f"with sequence parallelism, seq must be a multiple of tp {f.tp} x cp {f.cp} = {f.tp * f.cp}, "
            f"not {f.job.seq}",
            f"nearest: seq {near_multiples(f.tp * f.cp, f.job.seq)}, or disable sp",
        ),
    ),
    Rule(
        "experts_sp",  # MoELayer.forward; ModelParallelConfig.__post_init__ where ep is above 1
        lambda f: (f.tp > 1) & (f.sp == 0) & ((f.ep > 1) | ("moe" in f.model.kinds)),
        lambda f: (f"experts with tp {f.tp} require sequence parallelism", "set sp, or tp 1"),
    ),
    Rule(
        "cp_attention",  # DotProductAttention.__init__; TE's unfused backend does not support context parallelism
        lambda f: (f.cp > 1) & (f.job.options.impl == "local" or f.job.options.attention in ("unfused", "local")),
        lambda f: (
            f"context parallelism (cp {f.cp}) requires Transformer Engine's flash or fused attention, but attention "
            f"is {f.job.options.attention} and impl {f.job.options.impl}",
            "set cp 1, or attention flash and impl te",
        ),
    ),
    Rule(
        "vp_p2p",  # wrong gradients without an error: docs/rehearsal.md
        lambda f: f.interleaved & (f.pp == 2) & (not f.job.options.overlap_p2p),
        lambda f: (
            f"with vp {f.vp}, pp 2 and no overlap_p2p, concurrent sends between the two ranks are mismatched, and "
            "gradients are silently wrong",
            "set overlap_p2p, or pp 4, or remove vp",
        ),
    ),
    Rule(
        "recompute_groups",  # TransformerBlock._checkpointed_forward, uniform: the last group must be complete
        lambda f: (f.recompute == 2) & (f.recompute_block == 0) & (not f.model.pattern) & _split_unevenly(f),
        lambda f: (
            f"recompute_layers {f.recompute_layers} must divide the layers of every model chunk, "
            f"{', '.join(map(str, sorted(f.chunk_sizes)))}, with the uniform method",
            "set recompute_layers 1, or recompute_method block",
        ),
    ),
    Rule(
        "recompute_mtp",  # MultiTokenPredictionLayer._checkpointed_forward
        lambda f: (f.recompute == 2) & (f.recompute_block == 0) & (f.recompute_layers > 1) & (f.model.mtp_layers > 0),
        lambda f: (
            f"uniform recomputation of multi-token prediction requires recompute_layers 1, not {f.recompute_layers}",
            "set recompute_layers 1",
        ),
    ),
    Rule(
        "mla_attention",  # MLASelfAttention passes arguments that DotProductAttention does not accept
        lambda f: bool(f.model.kv_lora) and "local" in (f.job.options.impl, f.job.options.attention),
        lambda f: (
            "multi-latent attention requires Transformer Engine's attention instead of Megatron's (local)",
            "set attention flash, and impl te",
        ),
    ),
    Rule(
        "recompute_mla",  # TransformerConfig.__post_init__
        lambda f: f.recomputes("mla_up_proj") & (not f.model.kv_lora),
        lambda f: (
            "mla_up_proj can only be recomputed in multi-latent attention, which this model does not have",
            "remove mla_up_proj from recompute_modules",
        ),
    ),
    Rule(
        "recompute_experts",  # TransformerConfig.__post_init__: moe_act requires grouped GEMMs
        lambda f: f.recomputes("moe_act") & (f.model.experts == 0),
        lambda f: (
            "moe_act can only be recomputed in routed experts, which this model does not have",
            "remove moe_act from recompute_modules",
        ),
    ),
    Rule(
        "recompute_delayed",  # TransformerConfig.__post_init__
        lambda f: f.recomputes("moe_act", "layernorm") & (f.job.precision == "fp8ds"),
        lambda f: (
            "delayed scaling (fp8ds) does not support recomputation of moe_act or layernorm",
            "remove them from recompute_modules, or set precision fp8cs",
        ),
    ),
    Rule(
        "recompute_graphs",  # TransformerConfig.__post_init__
        lambda f: (f.recompute == 2) & f.job.options.cuda_graphs,
        lambda f: ("CUDA graphs do not support full recomputation", "set recompute selective, or disable cuda_graphs"),
    ),
    Rule(
        "overlap_experts",  # TransformerConfig.__post_init__
        lambda f: f.job.options.overlap_experts & _cannot_overlap_experts(f),
        lambda f: (
            "overlap_experts requires ep > 1, vp if pp > 1, BF16 or FP16 for unquantized operations, no "
            f"full recomputation and at most one MTP layer, but ep is {f.ep}, pp {f.pp}, vp {f.vp}",
            "change these, or disable overlap_experts",
        ),
    ),
    Rule(
        "fp8_params",  # TransformerConfig.__post_init__
        lambda f: _has_fp8_params_without_fp8(f.job),
        lambda f: (f"fp8_params requires an FP8 precision, not {f.job.precision}", "disable fp8_params"),
    ),
    Rule(
        "moments",  # OptimizerConfig.__post_init__: the precision-aware optimizer is a distributed optimizer
        lambda f: (f.sharding == 0) & (f.job.options.moments != "fp32"),
        lambda f: (f"moments in {f.job.options.moments} require the distributed optimizer", "set sharding zero1"),
    ),
    Rule(
        "zero2_overlap",  # MegatronFSDP.__init__; zero3 always overlaps
        lambda f: (f.sharding == 2) & (not f.job.options.overlap_grads),
        lambda f: ("zero2 in Megatron-FSDP requires overlap_grads", "set overlap_grads, or zero3"),
    ),
    Rule(
        "mamba_cp",  # MambaContextParallel.__init__
        _splits_mamba_heads_unevenly,
        lambda f: (
            f"cp {f.cp} must divide the {f.model.mamba_heads} Mamba heads / tp {f.tp}, and must divide the "
            f"{f.model.mamba_groups} groups / tp {f.tp} or be a multiple of them",
            "set cp 1",
        ),
    ),
)
"""Rules for every release of Megatron-Core."""

PINNED: tuple[Rule[JobInputs], ...] = (
    Rule(
        "fsdp_experts",  # mcore_fsdp_adapter._init_dist_index creates no expert group, which MegatronFSDP requires
        lambda f: (f.sharding >= 2) & (f.ep > 1) & ("moe" in f.model.kinds),
        lambda f: (
            f"Megatron-FSDP (zero2, zero3) in megatron-core 0.15 does not support expert parallelism, but ep is {f.ep}",
            "set sharding zero1, or ep 1",
        ),
    ),
    Rule(
        "both_ends_vp",  # get_transformer_layer_offset divides by the number of stages between them
        lambda f: f.both_ends & f.interleaved & (f.pp == 2),
        lambda f: (
            f"vp {f.vp} with first_layers and last_layers requires pp > 2, but pp is 2",
            "set only one of them, or chunks",
        ),
    ),
    Rule(
        "fsdp_pipeline",  # mcore_fsdp_adapter._get_dp_tp_mesh is a mesh of the entire world
        lambda f: (f.sharding >= 2) & (f.pp > 1),
        lambda f: (
            "Megatron-FSDP (zero2, zero3) in megatron-core 0.15 does not support pipeline parallelism, "
            f"but pp is {f.pp}",
            "set sharding zero1, or pp 1",
        ),
    ),
    Rule(
        "recompute_mtp_block",  # MultiTokenPredictionLayer._checkpointed_forward: NameError, a module not imported
        lambda f: (f.recompute == 2) & (f.recompute_block == 1) & (f.model.mtp_layers > 0),
        lambda f: (
            "the block method of recomputation raises an error with multi-token prediction in megatron-core 0.15",
            "set recompute_method uniform",
        ),
    ),
    Rule(
        "adapters_vp",  # NeMo 2.7.3, WrappedAdapterIO.save_checkpoint: chunks are called model_0, model_1 (measured)
        lambda f: f.interleaved & (f.job.task == "lora"),
        lambda f: (
            f"NeMo 2.7.3 does not save the adapters of interleaved stages in checkpoints, but vp is {f.vp}",
            "remove vp",
        ),
    ),
    Rule(
        "recompute_frozen",  # a checkpointed layer propagates gradients only if its input requires one (measured)
        lambda f: (f.recompute == 2) & (f.job.task == "lora"),
        lambda f: (
            "megatron-core 0.15 does not support full recomputation with adapters: the output of the frozen embedding "
            "requires no gradient, so the adapters of recomputed layers receive none",
            "set recompute selective, or increase tp, pp or cp",
        ),
    ),
    Rule(
        "recompute_frozen_norm",  # CheckpointWithoutOutput saves nothing of an input without gradient (measured)
        lambda f: f.recomputes("layernorm") & bool(f.model.kv_lora) & (f.job.task == "lora"),
        lambda f: (
            "megatron-core 0.15 does not support recomputation of the layernorm before latent attention with adapters: "
            "the output of the frozen embedding requires no gradient, and the backward pass of the first layer fails",
            "remove layernorm from recompute_modules",
        ),
    ),
    Rule(
        "recompute_frozen_up",  # CheckpointWithoutOutput propagates a gradient only if the input has one (measured)
        lambda f: f.recomputes("mla_up_proj") & _freezes_down_projections(f.job),
        lambda f: (
            "megatron-core 0.15 does not support recomputation of mla_up_proj with adapters of the up projections "
            "only: the output of the frozen down projections requires no gradient, so the up projections of the first "
            "layers receive none",
            "remove mla_up_proj from recompute_modules, or adapt linear_kv_down_proj",
        ),
    ),
    Rule(
        "mtp_alone",  # get_gpt_mtp_block_spec uses layer_specs[-1] of the last chunk
        lambda f: f.last_empty & (f.model.mtp_layers > 0),
        lambda f: (
            "megatron-core 0.15 builds multi-token prediction from the last layer of the last stage, but it has none",
            "assign a layer to the last stage: set other chunks, or remove loss_as_layer",
        ),
    ),
    Rule(
        "recompute_mlp_bias",  # CheckpointFunction treats the bias that MLP returns as its own output (measured)
        lambda f: f.recomputes("mlp") & bool(f.model.bias and "mlp" in f.model.kinds),
        lambda f: (
            "the backward pass of a recomputed mlp with biases recurses infinitely in megatron-core 0.15",
            "remove mlp from recompute_modules, or set recompute full",
        ),
    ),
)
"""Rules for the pinned releases; later releases do not have these restrictions."""
