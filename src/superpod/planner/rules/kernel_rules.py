"""Rules of what is compiled, in the form of `rules.py`: attention has a backend, FP8 and userbuffers have their sizes.

The tables are in `kernels/`. Only Megatron-Core with Transformer Engine's layers meets them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from superpod.planner.kernels import attention, fp8_shapes
from superpod.planner.kernels.attention import Attention
from superpod.planner.kernels.fused_attention import ARBITRARY, refused
from superpod.planner.rules import mxfp8_buffers
from superpod.planner.rules.rules import JobInputs, Rule, near_multiples

if TYPE_CHECKING:
    from superpod.planner.arrays import Boolean, Integer
    from superpod.planner.kernels.fp8_shapes import SizeRequirement, Weight
    from superpod.planner.models import ModelShape
    from superpod.planner.planned_job import Options, PlannedJob

TUNED = ("sft", "lora")
"""Tasks whose samples are packed: they come without padding, end to end (thd)."""

REMEMBERED = 2**12
"""Kinds of layers, and answers about them: a table of a hundred thousand rows asks about a few."""
UB_MXFP8 = 128
"""Tokens of a rank that userbuffers gather in MXFP8 (TE 2.9 module/base.py:592-597)."""


_choose = lru_cache(REMEMBERED)(attention.choose)
_asserts = lru_cache(REMEMBERED)(attention.failed_assertions)


def uses_te(job: PlannedJob) -> bool:
    """Whether Transformer Engine computes attention: not Megatron's own, and not a class of NeMo's beside it."""
    o = job.options
    known = o.impl == "te" and job.node.gpu.sm > 0
    return known and o.attention != "local" and not job.model.soft_capped


def layers(job: PlannedJob, cp: int = 1) -> tuple[Attention, ...]:
    """Every kind of attention layer of a job on so many context-parallel ranks, as Transformer Engine sees it."""
    return _layers(job.model, job.options, job.node.gpu.sm, job.precision == "fp16", job.task in TUNED, job.seq, cp)


@lru_cache(REMEMBERED)
def _layers(m: ModelShape, o: Options, sm: int, fp16: bool, tuned: bool, seq: int, cp: int) -> tuple[Attention, ...]:
    packed = tuned and not m.sink
    latent = m.kv_lora > 0
    backend = "flash" if m.flash_only else {"flash": "auto"}.get(o.attention, o.attention)
    return tuple(
        Attention(
            sm=sm,
            dtype="fp16" if fp16 else "bf16",
            qkv_layout="thd_thd_thd" if packed else "sbhd_sbhd_sbhd",
            mask="padding_causal" if packed else "causal",
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
        for window in sorted({_window(m, layer) for layer, blocks in enumerate(m.blocks) if _attends(blocks)})
    )


def _attends(blocks: Iterable[str]) -> bool:
    return bool({"attention", "mla"} & set(blocks))


def _window(m: ModelShape, layer: int) -> int:
    """Keys before a token that a layer's window takes in; -1 = no window, which chunks have not either."""
    return -1 if m.chunked or m.sees_all(layer) or not m.window else m.window


def _refuses(job: PlannedJob, cp: int) -> str:
    """Why some layer of a job has no backend, or is refused after it was chosen; "" = all run, without scores in memory
    or with the scores that the job has priced.
    """
    for layer in layers(job, cp):
        backend = _choose(layer).backend
        if backend == "unfused" and not job.keeps_scores:
            return f"only unfused attention, which keeps {job.seq:,} x {job.seq:,} scores: {_explain_no_kernel(layer)}"
        if not backend:
            return f"no attention backend: {_explain_no_kernel(layer)}"
        if asserted := [reason for reason in _asserts(layer) if reason is not attention.WHOLE_HEADS]:
            return asserted[0].text
    return ""


def falls_back_to_unfused(job: PlannedJob) -> bool:
    """Whether Transformer Engine has nothing for a run's layout but unfused attention, which it takes by itself."""
    if not uses_te(job) or job.keeps_scores or job.options.framework != "megatron":
        return False
    chosen = {_choose(layer).backend for layer in layers(job, job.layout.cp)}
    return "unfused" in chosen and "" not in chosen


CUDNN = (*(90000, 90100, 90201, 90300, 90500, 90600, 90700, 90800, 90900), *(91002, 91100, 91200, 91300, 91301))
"""Releases of cuDNN 9 up to the one that all recipes are planned with (`attention.CUDNN`), oldest first; of 9.10 the
last, whose first two have no attention (fused_attn.cpp:441-446)."""


def oldest_cudnn(job: PlannedJob) -> str:
    """The oldest cuDNN with which no layer of a job keeps its scores or has no attention; "" = any of version 9."""
    if not uses_te(job):
        return ""
    least = CUDNN[0]
    for layer in layers(job, job.layout.cp):
        if _choose(layer).backend not in ("flash", "fused"):
            continue  # with the newest neither: that is priced, or refused
        for cudnn in reversed(CUDNN):
            if _choose(replace(layer, cudnn=cudnn)).backend not in ("flash", "fused"):
                break
            oldest = cudnn
        least = max(least, oldest)
    return "" if least == CUDNN[0] else f"{least // 10000}.{least // 100 % 100}.{least % 100}"


def explain_refused_padding(job: PlannedJob) -> str:
    """Why no attention takes packed samples of a job's context parallelism; "" = some does.

    Each sample is padded to a multiple of 2 x cp tokens there, and padding between samples leaves cuDNN's attention
    only (utils.py:657-667), which has its own architectures and head sizes.
    """
    if job.layout.cp == 1 or not uses_te(job):
        return ""
    for layer in (replace(layer, pad_between=True) for layer in layers(job, job.layout.cp) if layer.format == "thd"):
        if not _choose(layer).backend:
            return _explain_no_kernel(layer)
    return ""


def _explain_no_kernel(layer: Attention) -> str:
    """Why no backend can be taken, or none but unfused attention, with the numbers that the reasons are about."""
    flash, fused = (
        attention.reasons_against(attention.FLASH2, layer)[0],
        attention.reasons_against(attention.FUSED, layer)[0],
    )
    sizes = f"{layer.head_qk} and {layer.head_v}" if layer.head_qk != layer.head_v else str(layer.head_qk)
    numbers = f": {sizes}" if "head" in flash.text else ""
    reasons = [
        f"not FlashAttention ({flash.text}{numbers})",
        f"not cuDNN's ({fused.text}{_kernel_lacks(layer, sizes)})",
    ]
    if unfused := attention.reasons_against(attention.UNFUSED, layer):
        packed = ", as in all fine-tuning; pretraining's are not" if unfused[0].text == "samples are packed" else ""
        reasons.append(f"not unfused attention ({unfused[0].text}{packed})")
    return ", ".join(reasons)


def _kernel_lacks(layer: Attention, sizes: str) -> str:
    """What cuDNN has no kernel for; "" = it has one."""
    says = {"head sizes": f"heads of {sizes}", "format": f"samples packed as {layer.format}"}
    lacks = [says.get(condition.name, condition.name) for condition in refused(ARBITRARY, layer)]
    return f": {', '.join(lacks)} on sm{layer.sm}" if lacks else ""


def _no_backend(f: JobInputs) -> Boolean:
    """Whether attention has no backend: of a layout's degrees, the answer hangs on cp alone."""
    if not uses_te(f.job):
        return False
    alone, split = bool(_refuses(f.job, 1)), bool(_refuses(f.job, 2))
    return ((f.cp == 1) & alone) | ((f.cp > 1) & split)


def _explain_no_backend(f: JobInputs) -> tuple[str, str]:
    job, cp = f.job, int(f.cp)
    fix = "another GPU"
    if cp > 1 and job.options.cp_comm != "a2a" and not _refuses(_by_heads(job), cp):
        fix = "set cp_comm a2a"
    elif cp > 1 and not _refuses(job, 1):
        fix = "set cp 1"
    elif cp == 1 and falls_back_to_unfused(job):
        fix = "another GPU, or attention unfused"
    # A layout without context parallelism that is refused as well is no matter of cp.
    degree = f" with cp {cp}" if cp > 1 and not _refuses(job, 1) else ""
    reason = _refuses(job, cp if degree else 1)
    return f"{job.model.name} on {job.node.gpu.name}{degree}, Transformer Engine 2.9: {reason}", fix


def _by_heads(job: PlannedJob) -> PlannedJob:
    return job.replace(options=replace(job.options, cp_comm="a2a"))


def _splits_heads(f: JobInputs) -> Boolean:
    """Whether a2a cannot give every context-parallel rank whole heads (context_parallel.py:3189-3191)."""
    if not uses_te(f.job) or f.job.options.cp_comm != "a2a" or "attention" not in f.model.kinds:
        return False
    parts = f.tp * f.cp
    return (f.cp > 1) & ((f.model.heads % parts != 0) | (f.model.groups % parts != 0))


def _steps(f: JobInputs) -> SizeRequirement | None:
    return fp8_shapes.REQUIREMENTS.get(f.job.precision) if f.job.options.impl == "te" else None


def _odd_weights(f: JobInputs) -> list[tuple[Weight, Boolean]]:
    steps = _steps(f)
    if steps is None:
        return []
    return [(w, fp8_shapes.weight_misfits(steps, w, f.sp)) for w in fp8_shapes.weights(f.model, f.tp, f.etp)]


def _breaks_weights(f: JobInputs) -> Boolean:
    broken: Boolean = False
    for _, odd in _odd_weights(f):
        broken = broken | odd
    return broken


def _explain_weights(f: JobInputs) -> tuple[str, str]:
    steps = _steps(f)
    assert steps is not None
    first = next(weight for weight, odd in _odd_weights(f) if odd)
    plain = first.rows % steps.weight or first.columns % steps.weight
    rule = (
        f"multiples of {steps.weight}" if plain else f"a multiple of {steps.gathered} columns where they are gathered"
    )
    return (
        f"{f.job.precision} needs {rule}, and {first.name} of {f.model.name} has {first.rows:,} x {first.columns:,} "
        f"on a rank with tp {f.tp}, etp {f.etp}",
        "a smaller tp" if f.tp > 1 else "set precision bf16, or another FP8",
    )


def _gathers_mxfp8(f: JobInputs) -> Boolean:
    """Whether MXFP8 parameters are gathered in the gradients' buffer; adapters beside them are not."""
    o = f.job.options
    kept = o.framework == "megatron" and o.impl == "te" and o.fp8_params and f.job.task != "lora"
    return (f.sharding > 0) & (kept and f.job.precision == "mxfp8")


def _misplaces(f: JobInputs) -> Boolean:
    odd: Boolean = False
    for parameter in mxfp8_buffers.non_matrix_parameters(f.model, f.tp, f.etp):
        odd = odd | (parameter.size % mxfp8_buffers.STEP != 0)
    return _gathers_mxfp8(f) & odd


def _explain_misplaced(f: JobInputs) -> tuple[str, str]:
    small = mxfp8_buffers.non_matrix_parameters(f.model, f.tp, f.etp)
    first = next(parameter for parameter in small if parameter.size % mxfp8_buffers.STEP)
    return (
        f"megatron-core 0.15.3 gathers MXFP8 parameters wrongly after one whose size is no multiple of "
        f"{mxfp8_buffers.STEP}, and {first.name} of {f.model.name} has {first.size} on a rank with tp {f.tp}, "
        f"etp {f.etp}",
        "keep parameters in BF16: drop fp8_params (fp8_param_gather=False, reuse_grad_buf_for_mxfp8_param_ag=False)"
        + (", or a smaller tp" if f.tp > 1 else ""),
    )


def _tokens(f: JobInputs) -> Integer:
    """Tokens of a micro-batch on a context-parallel rank."""
    return f.job.seq * f.mbs // f.cp


def _breaks_tokens(f: JobInputs) -> Boolean:
    steps = _steps(f)
    return steps is not None and fp8_shapes.tokens_misfit(steps, _tokens(f), f.tp, f.sp)


def _explain_tokens(f: JobInputs) -> tuple[str, str]:
    steps = _steps(f)
    assert steps is not None
    ranks = f.cp * (f.tp if f.sp else 1)
    step = max(steps.tokens * f.cp, steps.local * ranks if f.sp else 1)
    return (
        f"{f.job.precision} multiplies tokens in steps of {steps.tokens}, of {steps.local} before they are gathered, "
        f"and a rank has seq {f.job.seq} x mbs {f.mbs} / (cp {f.cp} x tp {ranks // f.cp}) = "
        f"{f.job.seq * f.mbs // ranks}",
        f"nearest: seq {near_multiples(step, f.job.seq * f.mbs)} / mbs, or a smaller tp or cp",
    )


def _ub(f: JobInputs) -> Boolean:
    """Whether userbuffers hide tensor-parallel communication."""
    return (f.tp > 1) & f.sp & (f.job.options.overlap_tp and f.job.options.impl == "te")


KERNELS: tuple[Rule[JobInputs], ...] = (
    Rule(
        "attention_backend", _no_backend, _explain_no_backend
    ),  # dot_product_attention/utils.py, get_attention_backend
    Rule(
        "attention_heads",  # context_parallel.py:3189-3191
        _splits_heads,
        lambda f: (
            f"context parallelism by a2a gives every rank whole heads: tp {f.tp} x cp {f.cp} must divide the "
            f"{f.model.heads} heads and the {f.model.groups} groups",
            f"set cp to a divisor of {max(f.model.groups // int(f.tp), 1)}",
        ),
    ),
    Rule("fp8_weights", _breaks_weights, _explain_weights),  # kernels/fp8_shapes.py
    Rule("fp8_tokens", _breaks_tokens, _explain_tokens),
    Rule("mxfp8_sizes", _misplaces, _explain_misplaced),  # distributed/param_and_grad_buffer.py:99-102, 593
    Rule(
        "ub_mxfp8",  # module/base.py:592-597
        lambda f: _ub(f) & (f.job.precision == "mxfp8") & (_tokens(f) // f.tp % UB_MXFP8 != 0),
        lambda f: (
            f"userbuffers gather MXFP8 in steps of {UB_MXFP8} tokens of a rank, and seq {f.job.seq} x mbs {f.mbs} / "
            f"(cp {f.cp} x tp {f.tp}) = {int(_tokens(f)) // int(f.tp)}",
            f"nearest: tokens {near_multiples(UB_MXFP8, int(_tokens(f)) // int(f.tp))} of a rank, or drop overlap_tp",
        ),
    ),
)
"""Rules of Transformer Engine 2.9.0 and its compiled library."""
