"""Rules for compiled kernels, in the form of `rules.py`: attention backends, and sizes for FP8 and userbuffers.

The tables are in `kernels/`. The rules apply to Megatron-Core with Transformer Engine's layers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from superpod.planner.kernels import attention, fp8_shapes
from superpod.planner.kernels.attention import Attention
from superpod.planner.kernels.fused_attention import ARBITRARY, unmet_conditions
from superpod.planner.rules import mxfp8_buffers
from superpod.planner.rules.rules import JobInputs, Rule, near_multiples

if TYPE_CHECKING:
    from superpod.planner.arrays import Boolean, Integer
    from superpod.planner.kernels.fp8_shapes import SizeRequirement, Weight
    from superpod.planner.models import ModelShape
    from superpod.planner.planned_job import Options, PlannedJob

PACKED_TASKS = ("sft", "lora")
"""Tasks whose samples are packed (thd)."""

CACHE_SIZE = 2**12
"""Entries per cache; a table of a hundred thousand rows has only a few distinct attention layers."""
UB_MXFP8 = 128
"""Tokens per rank must be a multiple of this for userbuffers in MXFP8 (TE 2.9 module/base.py:592-597)."""


_choose = lru_cache(CACHE_SIZE)(attention.choose)
_failed_assertions = lru_cache(CACHE_SIZE)(attention.failed_assertions)


def uses_te(job: PlannedJob) -> bool:
    """Return whether attention is Transformer Engine's, not a class in Megatron or NeMo, and the GPU's sm is known."""
    o = job.options
    is_known = o.impl == "te" and job.node.gpu.sm > 0
    return is_known and o.attention != "local" and not job.model.soft_capped


def layers(job: PlannedJob, cp: int = 1) -> tuple[Attention, ...]:
    """Return the distinct attention layers of a job with `cp` context-parallel ranks, for `attention.choose`."""
    return _build_layers(
        job.model, job.options, job.node.gpu.sm, job.precision == "fp16", job.task in PACKED_TASKS, job.seq, cp
    )


@lru_cache(CACHE_SIZE)
def _build_layers(
    m: ModelShape, o: Options, sm: int, fp16: bool, packs: bool, seq: int, cp: int
) -> tuple[Attention, ...]:
    """Return the layers of `layers`; `packs`: whether the task packs samples."""
    is_packed = packs and not m.sink
    latent = m.kv_lora > 0
    backend = "flash" if m.flash_only else {"flash": "auto"}.get(o.attention, o.attention)
    return tuple(
        Attention(
            sm=sm,
            dtype="fp16" if fp16 else "bf16",
            qkv_layout="thd_thd_thd" if is_packed else "sbhd_sbhd_sbhd",
            mask="padding_causal" if is_packed else "causal",
            softmax="learnable" if m.sink else "vanilla",
            dropout=o.attention_dropout,
            seq_q=seq,
            seq_kv=seq,
            window_left=window,
            window_right=0,
            cp=cp,
            cp_comm=o.cp_comm,
            deterministic=o.deterministic,
            backend=backend,
            head_qk=m.qk_nope_dim + m.qk_rope_dim if latent else m.channels,
            head_v=m.v_dim if latent else m.channels,
            heads=m.heads,
            groups=m.heads if latent else m.groups,
        )
        for window in sorted(
            {_window_left(m, i) for i, blocks in enumerate(m.blocks) if {"attention", "mla"} & {*blocks}}
        )
    )


def _window_left(m: ModelShape, layer: int) -> int:
    """Return the keys before a token that a layer's sliding window includes; -1 = no window, or chunked attention."""
    if m.chunked or m.sees_all(layer) or not m.window:
        return -1
    return m.window


def _explain_unsupported(job: PlannedJob, cp: int) -> str:
    """Return why an attention layer of a job has no usable backend with `cp` ranks; "" if all layers have one.

    Unfused attention is usable only if the plan includes the memory of its scores (`keeps_scores`).
    """
    for layer in layers(job, cp):
        backend = _choose(layer).backend
        if backend == "unfused" and not job.keeps_scores:
            scores = f"{job.seq:,} x {job.seq:,}"
            return f"only unfused attention is available, which stores {scores} scores: {_explain_no_kernel(layer)}"
        if not backend:
            return f"no attention backend is available: {_explain_no_kernel(layer)}"
        for reason in _failed_assertions(layer):
            if reason is not attention.WHOLE_HEADS:
                return reason.text
    return ""


def falls_back_to_unfused(job: PlannedJob) -> bool:
    """Return whether some layer has only unfused attention, which Transformer Engine chooses without a warning."""
    if not uses_te(job) or job.keeps_scores or job.options.framework != "megatron":
        return False
    backends = {_choose(layer).backend for layer in layers(job, job.layout.cp)}
    return "unfused" in backends and "" not in backends


CUDNN = (*(90000, 90100, 90201, 90300, 90500, 90600, 90700, 90800, 90900), *(91002, 91100, 91200, 91300, 91301))
"""Releases of cuDNN 9 up to `attention.CUDNN`, which plans assume, oldest first. 9.10.0 and 9.10.1 have no fused
attention (fused_attn.cpp:441-446)."""


def oldest_cudnn(job: PlannedJob) -> str:
    """Return the oldest cuDNN that has flash or fused attention for all layers, such as `9.5.0`; "" = any cuDNN 9."""
    if not uses_te(job):
        return ""
    required_release = CUDNN[0]
    for layer in layers(job, job.layout.cp):
        if _choose(layer).backend not in ("flash", "fused"):
            continue  # no release supports the layer: the plan includes its scores, or it violates a rule
        for cudnn in reversed(CUDNN):
            if _choose(replace(layer, cudnn=cudnn)).backend not in ("flash", "fused"):
                break
            oldest = cudnn
        required_release = max(required_release, oldest)
    if required_release == CUDNN[0]:
        return ""
    return f"{required_release // 10000}.{required_release // 100 % 100}.{required_release % 100}"


def explain_refused_padding(job: PlannedJob) -> str:
    """Return why no backend supports packed samples that are padded for context parallelism; "" if one does.

    Context parallelism pads each sample to a multiple of 2 x cp tokens, and only cuDNN's attention supports padding
    between samples (utils.py:657-667), with its own restrictions on architectures and head sizes.
    """
    if job.layout.cp == 1 or not uses_te(job):
        return ""
    for layer in layers(job, job.layout.cp):
        if layer.format != "thd":
            continue
        padded_layer = replace(layer, pad_between=True)
        if not _choose(padded_layer).backend:
            return _explain_no_kernel(padded_layer)
    return ""


def _explain_no_kernel(layer: Attention) -> str:
    """Return why flash and fused attention, and possibly unfused attention, are not available for a layer."""
    flash = attention.reasons_against(attention.FLASH2, layer)[0]
    fused = attention.reasons_against(attention.FUSED, layer)[0]
    sizes = f"{layer.head_qk} and {layer.head_v}" if layer.head_qk != layer.head_v else str(layer.head_qk)
    numbers = f": {sizes}" if "head" in flash.text else ""
    reasons = [
        f"not FlashAttention ({flash.text}{numbers})",
        f"not cuDNN's ({fused.text}{_describe_unmet(layer, sizes)})",
    ]
    unfused = attention.reasons_against(attention.UNFUSED, layer)
    if unfused:
        note = ", which all fine-tuning uses; pretraining does not" if unfused[0].text == "packed samples" else ""
        reasons.append(f"not unfused attention ({unfused[0].text}{note})")
    return ", ".join(reasons)


def _describe_unmet(layer: Attention, sizes: str) -> str:
    """Format the conditions of cuDNN's kernel that a layer does not meet, as `: mask on sm90`; "" if it meets all."""
    names = {"head sizes": f"heads of {sizes}", "format": f"samples packed as {layer.format}"}
    unmet_names = [names.get(condition.name, condition.name) for condition in unmet_conditions(ARBITRARY, layer)]
    return f": {', '.join(unmet_names)} on sm{layer.sm}" if unmet_names else ""


def _no_backend(f: JobInputs) -> Boolean:
    """Return whether attention has no usable backend; of the parallel degrees, this depends only on cp."""
    if not uses_te(f.job):
        return False
    without_cp, with_cp = bool(_explain_unsupported(f.job, 1)), bool(_explain_unsupported(f.job, 2))
    return ((f.cp == 1) & without_cp) | ((f.cp > 1) & with_cp)


def _explain_no_backend(f: JobInputs) -> tuple[str, str]:
    job, cp = f.job, int(f.cp)
    with_a2a = job.replace(options=replace(job.options, cp_comm="a2a"))
    cp_is_the_cause = cp > 1 and not _explain_unsupported(job, 1)
    if cp > 1 and job.options.cp_comm != "a2a" and not _explain_unsupported(with_a2a, cp):
        fix = "set cp_comm a2a"
    elif cp_is_the_cause:
        fix = "set cp 1"
    elif cp == 1 and falls_back_to_unfused(job):
        fix = "use a different GPU, or set attention unfused"
    else:
        fix = "use a different GPU"

    subject = f"{job.model.name} on {job.node.gpu.name}"
    if cp_is_the_cause:
        return f"{subject} with cp {cp}, Transformer Engine 2.9: {_explain_unsupported(job, cp)}", fix
    return f"{subject}, Transformer Engine 2.9: {_explain_unsupported(job, 1)}", fix


def _splits_heads(f: JobInputs) -> Boolean:
    """Return whether a2a cannot assign complete heads to all context-parallel ranks (context_parallel.py:3189)."""
    if not uses_te(f.job) or f.job.options.cp_comm != "a2a" or "attention" not in f.model.kinds:
        return False
    parts = f.tp * f.cp
    return (f.cp > 1) & ((f.model.heads % parts != 0) | (f.model.groups % parts != 0))


def _size_requirement(f: JobInputs) -> SizeRequirement | None:
    """Return the size requirement of the precision; None without FP8 or without Transformer Engine's layers."""
    return fp8_shapes.REQUIREMENTS.get(f.job.precision) if f.job.options.impl == "te" else None


def _check_weights(f: JobInputs) -> list[tuple[Weight, Boolean]]:
    """Return (weight, whether its size violates the requirement) for all FP8 weights; [] without FP8."""
    requirement = _size_requirement(f)
    if requirement is None:
        return []
    weights = fp8_shapes.weights(f.model, f.tp, f.etp)
    return [(weight, fp8_shapes.weight_misfits(requirement, weight, f.sp)) for weight in weights]


def _has_invalid_weights(f: JobInputs) -> Boolean:
    """Return whether a weight violates the size requirement of FP8."""
    is_invalid: Boolean = False
    for _, misfits in _check_weights(f):
        is_invalid = is_invalid | misfits
    return is_invalid


def _explain_weights(f: JobInputs) -> tuple[str, str]:
    requirement = _size_requirement(f)
    assert requirement is not None
    first = next(weight for weight, misfits in _check_weights(f) if misfits)
    rule = f"a multiple of {requirement.gathered} columns in weights whose input is gathered"
    if first.rows % requirement.weight or first.columns % requirement.weight:
        rule = f"rows and columns of weights to be multiples of {requirement.weight}"
    return (
        f"{f.job.precision} requires {rule}, but {first.name} of {f.model.name} has {first.rows:,} x "
        f"{first.columns:,} per rank with tp {f.tp}, etp {f.etp}",
        "reduce tp" if f.tp > 1 else "set precision bf16, or a different FP8 precision",
    )


def _gathers_mxfp8(f: JobInputs) -> Boolean:
    """Return whether MXFP8 parameters are all-gathered in the gradient buffer; with adapters, they are not."""
    o = f.job.options
    keeps_parameters = o.framework == "megatron" and o.impl == "te" and o.fp8_params and f.job.task != "lora"
    return (f.sharding > 0) & (keeps_parameters and f.job.precision == "mxfp8")


def _corrupts_parameters(f: JobInputs) -> Boolean:
    """Return whether Megatron corrupts MXFP8 parameters (see `mxfp8_buffers`)."""
    unaligned: Boolean = False
    for parameter in mxfp8_buffers.non_matrix_parameters(f.model, f.tp, f.etp):
        unaligned = unaligned | (parameter.size % mxfp8_buffers.ALIGNMENT != 0)
    return _gathers_mxfp8(f) & unaligned


def _explain_corruption(f: JobInputs) -> tuple[str, str]:
    small = mxfp8_buffers.non_matrix_parameters(f.model, f.tp, f.etp)
    first = next(parameter for parameter in small if parameter.size % mxfp8_buffers.ALIGNMENT)
    return (
        f"megatron-core 0.15.3 corrupts MXFP8 parameters that follow one whose size is not a multiple of "
        f"{mxfp8_buffers.ALIGNMENT}, and {first.name} of {f.model.name} has {first.size} elements per rank with "
        f"tp {f.tp}, etp {f.etp}",
        "keep parameters in BF16: disable fp8_params (fp8_param_gather=False, reuse_grad_buf_for_mxfp8_param_ag=False)"
        + (", or reduce tp" if f.tp > 1 else ""),
    )


def _tokens_per_rank(f: JobInputs) -> Integer:
    """Return the number of tokens of a micro-batch on each context-parallel rank."""
    return f.job.seq * f.mbs // f.cp


def _has_invalid_tokens(f: JobInputs) -> Boolean:
    """Return whether the tokens per rank violate the size requirement of FP8."""
    requirement = _size_requirement(f)
    return requirement is not None and fp8_shapes.tokens_misfit(requirement, _tokens_per_rank(f), f.tp, f.sp)


def _explain_tokens(f: JobInputs) -> tuple[str, str]:
    requirement = _size_requirement(f)
    assert requirement is not None
    ranks, step = f.cp, requirement.tokens * f.cp
    if f.sp:
        ranks = f.cp * f.tp
        step = max(step, requirement.local * ranks)
    return (
        f"{f.job.precision} requires the tokens per rank to be a multiple of {requirement.tokens}, and of "
        f"{requirement.local} before the all-gather, but seq {f.job.seq} x mbs {f.mbs} / (cp {f.cp} x tp "
        f"{ranks // f.cp}) = {f.job.seq * f.mbs // ranks}",
        f"nearest: seq {near_multiples(step, f.job.seq * f.mbs)} / mbs, or reduce tp or cp",
    )


KERNELS: tuple[Rule[JobInputs], ...] = (
    # dot_product_attention/utils.py, get_attention_backend
    Rule("attention_backend", _no_backend, _explain_no_backend),
    Rule(
        "attention_heads",  # context_parallel.py:3189-3191
        _splits_heads,
        lambda f: (
            f"with cp_comm a2a, tp {f.tp} x cp {f.cp} must divide the {f.model.heads} heads and the "
            f"{f.model.groups} groups",
            f"set cp to a divisor of {max(f.model.groups // int(f.tp), 1)}",
        ),
    ),
    Rule("fp8_weights", _has_invalid_weights, _explain_weights),  # kernels/fp8_shapes.py
    Rule("fp8_tokens", _has_invalid_tokens, _explain_tokens),
    Rule("mxfp8_sizes", _corrupts_parameters, _explain_corruption),  # distributed/param_and_grad_buffer.py:99-102, 593
    Rule(
        "ub_mxfp8",  # module/base.py:592-597
        lambda f: (
            ((f.tp > 1) & f.sp & (f.job.options.overlap_tp and f.job.options.impl == "te"))
            & (f.job.precision == "mxfp8")
            & (_tokens_per_rank(f) // f.tp % UB_MXFP8 != 0)
        ),
        lambda f: (
            f"userbuffers in MXFP8 require the tokens per rank to be a multiple of {UB_MXFP8}, but seq {f.job.seq} x "
            f"mbs {f.mbs} / (cp {f.cp} x tp {f.tp}) = {int(_tokens_per_rank(f)) // int(f.tp)}",
            f"nearest: {near_multiples(UB_MXFP8, _tokens_per_rank(f) // f.tp)} tokens per rank, or disable overlap_tp",
        ),
    ),
)
"""Rules for Transformer Engine 2.9.0 and its compiled library."""
