"""Suggest single changes to a run, such as `cp 2`, that free memory or save time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from superpod.planner import predict
from superpod.planner.layout import MEGATRON_FSDP, SHARDINGS, Layout
from superpod.planner.planned_job import Options, PlannedJob
from superpod.planner.predict import Prediction

SEARCH = "`recipes plan` searches combinations"


@dataclass(frozen=True)
class Saving:
    """A change to a run that frees memory, and its effect."""

    what: str
    """The change, such as `cp 2` or `full recompute`."""
    job: PlannedJob
    """The changed job."""
    prediction: Prediction
    frees_gib: float
    slower: float
    """Relative change of the step time; 0.03 = 3 % slower."""


def memory_savings(job: PlannedJob, before: Prediction | None = None) -> list[Saving]:
    """Return the legal single changes that free memory, first those that make the run fit, each by step time."""
    before = before or predict.one(job)
    if before.step_time_s is None or before.reserved_gib_max is None:
        return []
    changed_jobs = [(what, job.replace(layout=layout)) for what, layout in _layout_changes(job)]
    changed_jobs += [(what, job.replace(options=options)) for what, options in _option_changes(job)]
    savings = []
    for (what, other), after in zip(changed_jobs, predict.many([other for _, other in changed_jobs]), strict=True):
        frees = before.reserved_gib_max - (after.reserved_gib_max or 0)
        if (
            after.step_time_s and frees > 0.05
        ):  # illegal jobs have no step time; GiB; less is within the error of the memory model
            savings.append(Saving(what, other, after, frees, after.step_time_s / before.step_time_s - 1))
    return sorted(savings, key=lambda m: (m.prediction.short_gib > 0, m.slower))


def faster_changes(job: PlannedJob, before: Prediction, count: int = 3) -> list[str]:
    """Describe up to `count` single changes that fit and reduce the step time by at least 1 %, the fastest first."""
    changed_jobs = [(what, job.replace(layout=layout)) for what, layout in (*_layout_changes(job), *_reversals(job))]
    predictions = zip(changed_jobs, predict.many([other for _, other in changed_jobs]), strict=True)
    fits = [(what, p.step_time_s) for (what, _), p in predictions if p.fit == "fits" and p.step_time_s]
    gains = [(seconds / (before.step_time_s or 1.0) - 1, what) for what, seconds in fits]
    return [f"{what} reduces the step time by {-gain:.1%}" for gain, what in sorted(gains) if gain < -0.01][:count]


def describe_shortage(job: PlannedJob, before: Prediction, combined: str = SEARCH) -> str:
    """Describe how much memory a run lacks and up to three changes that free memory: `40.2 GiB short: cp 2 frees ..`.

    If single changes make the run fit, only those are listed, by step time; else the hint `combined` follows.
    """
    missing = max(0.0, before.short_gib)
    savings = memory_savings(job, before)
    enough = [m for m in savings if m.prediction.short_gib <= 0][:3]
    shown_savings = enough or sorted(savings, key=lambda m: -m.frees_gib)[:3]
    if not shown_savings:
        return f"{missing:.1f} GiB short, and no single change to the layout frees memory: use more GPUs"
    savings_text = ", ".join(f"{m.what} frees {m.frees_gib:.1f} ({m.slower:+.0%} time)" for m in shown_savings)
    note = "; each of them is enough" if len(enough) > 1 else ""
    if not enough:
        note = "; no single change is enough" + (f": {combined}" if combined else "")
    return f"{missing:.1f} GiB short: {savings_text}{note}"


def advise_more_memory(job: PlannedJob) -> str:
    """Return the hint for a run that no single change makes fit: more GPUs, or a higher memory cap if it has one."""
    cap = job.options.memory_cap
    return "use more GPUs" if cap is None else f"use more GPUs or raise the memory cap of {cap:g} GiB"


def _layout_changes(job: PlannedJob) -> Iterator[tuple[str, Layout]]:
    """Yield (description, layout) for changes of the layout that usually free memory."""
    layout = job.layout
    for key in ("tp", "pp", "cp", "ep"):
        doubled = getattr(layout, key) * 2
        sp = layout.sp or key == "tp"
        if key != "ep" or job.model.is_moe:
            yield f"{key} {doubled}", layout.replace(**{key: doubled}, sp=sp)
    if layout.mbs % 2 == 0:
        yield f"mbs {layout.mbs // 2}", layout.replace(mbs=layout.mbs // 2)
    for level in SHARDINGS[SHARDINGS.index(layout.sharding) + 1 :] if layout.pp == 1 else ():
        if level in MEGATRON_FSDP and job.task != "pretrain":  # Megatron-FSDP cannot start from pretrained weights
            continue
        yield f"{level} (unmeasured)" if level in MEGATRON_FSDP else level, layout.replace(sharding=level)
    if layout.recompute != "full":
        for module in ("layernorm", "mlp", "moe_act", "moe", "mla_up_proj"):
            changed = layout.replace(recompute="selective", recompute_modules=(module,))
            yield f"recomputing {module}", changed
        for layers in (1, 2, 4, 8):
            changed = layout.replace(recompute="full", recompute_method="block", recompute_layers=layers)
            yield f"full recompute of {layers} layer{'s' * (layers > 1)} per chunk", changed
        yield "full recompute", layout.replace(recompute="full", recompute_method="uniform", recompute_layers=1)


def _reversals(job: PlannedJob) -> Iterator[tuple[str, Layout]]:
    """Yield (description, layout) for changes of the layout that usually save time and need more memory."""
    layout = job.layout
    for key in ("tp", "pp", "cp", "ep"):
        if (degree := getattr(layout, key)) % 2 == 0:
            halved = layout.replace(**{key: degree // 2})
            if key == "tp" and degree == 2:
                halved = halved.replace(sp=False)
            if key == "pp" and degree == 2:
                halved = halved.replace(vp=None)
            yield f"{key} {degree // 2}", halved
    if layout.pp > 1:
        yield from ((f"vp {v}", layout.replace(vp=v)) for v in (2, 3, 4, 5, 6, 8, 10) if v != layout.vp)
    yield f"mbs {layout.mbs * 2}", layout.replace(mbs=layout.mbs * 2)
    if layout.recompute != "none":
        yield "no recomputation", layout.replace(recompute="none")
    if layout.sharding in MEGATRON_FSDP:
        yield "zero1", layout.replace(sharding="zero1")


def _option_changes(job: PlannedJob) -> Iterator[tuple[str, Options]]:
    """Yield (description, options) for changes of options that free memory."""
    if job.options.moments == "fp32" and job.task != "lora":
        yield "BF16 moments", replace(job.options, moments="bf16")
    if job.options.offload < 1 and job.task != "lora":
        yield "the optimizer in host memory", replace(job.options, offload=1.0)
