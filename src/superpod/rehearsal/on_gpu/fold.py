"""Folds a job onto one GPU: the shapes that one of its ranks holds, with fewer layers.

Computes with the planner's `PlannedJob`, without NeMo. Each size is divided by its parallel size, so that the kernels
have the shapes of the real run: heads, MLPs and vocabulary by TP, experts by EP, the sequence by CP.
"""

from __future__ import annotations

from dataclasses import replace

from superpod.planner import predict
from superpod.planner.layout import Layout
from superpod.planner.models import ModelShape
from superpod.planner.planned_job import PlannedJob
from superpod.rehearsal.errors import RehearsalError
from superpod.rehearsal.training.shrink import refuse_unsupported, round_up

MICRO_BATCHES = 2
"""Micro-batches per step, so that gradients are also accumulated."""
VOCAB_MULTIPLE = 128
"""The vocabulary of a rank is rounded up to a multiple of this."""


def fold(
    job: PlannedJob, layers: int = 0, micro_batches: int = MICRO_BATCHES, limit_gib: float | None = None
) -> PlannedJob:
    """Return the job as one of its ranks executes it, on one GPU.

    Args:
        job: a job whose layout is legal.
        layers: number of layers; 0 = the smallest number with every kind of layer.
        micro_batches: micro-batches per step.
        limit_gib: GPU memory in GiB. If given, the job has as many layers as fit, but at most `layers` if not 0.

    Raises:
        RehearsalError: the model needs GPU packages or several GPUs, or the smallest number of layers does not fit.
    """
    refuse_unsupported(job)
    min_layers = max(2, job.model.moe_every, job.model.global_every)
    if limit_gib is None:
        return _fold(job, layers or min_layers, micro_batches)
    return _fold_most_layers(job, min_layers, layers or job.model.layers, micro_batches, limit_gib)


def _fold_most_layers(
    job: PlannedJob, min_layers: int, max_layers: int, micro_batches: int, limit_gib: float
) -> PlannedJob:
    """Return the folded job with the most layers that fit in `limit_gib`; raise RehearsalError if none fit."""
    best = None
    low, high = min_layers, max(min_layers, max_layers)
    while low <= high:  # binary search
        middle = (low + high) // 2
        folded_job = _fold(job, middle, micro_batches)
        if predicted_gib(folded_job) <= limit_gib:
            best, low = folded_job, middle + 1
        else:
            high = middle - 1
    if best is None:
        needed_gib = predicted_gib(_fold(job, min_layers, micro_batches))
        raise RehearsalError(
            f"{job.model.name} with {min_layers} layers needs {needed_gib:.0f} GiB on one GPU, "
            f"but {limit_gib:.0f} GiB are free"
        )
    return best


def predicted_gib(job: PlannedJob) -> float:
    """Return the memory in GiB that the planner expects a rank to reserve.

    Raises:
        RehearsalError: the planner cannot predict the job, because its layout is illegal.
    """
    prediction = predict.one(job)
    if prediction.reserved_gib_max is None:
        raise RehearsalError(f"{job.model.name} folded onto one GPU is {prediction.verdict}: {prediction.reason}")
    return prediction.reserved_gib_max


def _fold(job: PlannedJob, layers: int, micro_batches: int) -> PlannedJob:
    layout = _fold_layout(job.layout, micro_batches)
    model = _fold_model(job.model, job.layout, layers)
    # DeepEP sends tokens to other GPUs, and Megatron rejects it on one.
    options = replace(job.options, overlap_tp=False, overlap_experts=False, deepep=False, optimizer_instances=1)
    return job.replace(model=model, layout=layout, options=options, gpus=1, seq=job.seq // job.layout.cp)


def _fold_layout(layout: Layout, micro_batches: int) -> Layout:
    return Layout(
        mbs=layout.mbs,
        gbs=layout.mbs * micro_batches,
        recompute=layout.recompute,
        recompute_method=layout.recompute_method,
        recompute_layers=1,
        recompute_modules=layout.recompute_modules,
        sharding=layout.sharding,
    )


def _fold_model(m: ModelShape, layout: Layout, layers: int) -> ModelShape:
    """Return the part of model `m` that a rank of `layout` holds, with `layers` layers."""
    tp = layout.tp
    etp = tp if layout.etp is None else layout.etp
    changes: dict[str, object] = {
        "layers": layers,
        "heads": m.heads // tp,
        "ffn": m.ffn // tp,
        "vocab": round_up(m.padded_vocab(tp) // tp, VOCAB_MULTIPLE),
        "expert_ffn": m.expert_ffn // etp,
        "shared_ffn": m.shared_ffn // tp,
        "dense_first": m.dense_first if m.dense_first < layers else min(m.dense_first, 1),
    }
    if not m.kv_lora:  # latent attention has its own sizes of heads
        changes |= {"kv_heads": max(1, m.groups // tp), "head_dim": m.channels}
    if m.experts:
        # A rank's own experts, but enough for the router to choose from.
        changes["experts"] = min(m.experts, max(m.experts // layout.ep, 2 * m.topk))
    return m.replace(**changes)
