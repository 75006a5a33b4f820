"""The layout of the textbook rules, to compare a search with.

The rules as they are taught (arXiv:2104.04473 section 3; Megatron-LM's and NeMo's performance guides): tensor
parallelism up to the GPUs of a node and no further, pipeline stages of at least four layers until the model's states
fit, at least 4(p - 1) micro-batches so that the bubble stays small, data parallelism for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from superpod.errors import UserError
from superpod.planner import legality
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob

STATE_BYTES = 18
"""Per parameter: BF16 weights, FP32 gradients, Adam's FP32 states (Megatron without its distributed optimizer)."""
SHARE = 0.6
"""Share of a GPU's memory for those states; activations take the rest."""
STAGE_LAYERS = 4
SIZES = ((3e9, 1), (8e9, 2), (20e9, 4))
"""(parameters, tp): up to so many parameters that tp is enough; above them, the GPUs of a node."""


@dataclass(frozen=True)
class Rules:
    """The layout of the rules, and their verdict on its pipeline."""

    layout: Layout
    bubble: float
    """(p - 1) / (m + p - 1) of the step."""
    notes: tuple[str, ...]


def choose(job: PlannedJob) -> Rules:
    """The textbook's layout for a run; `job.layout` gives the global batch only.

    Raises:
        UserError: when the rules end in no legal layout.
    """
    whole = job.model.total_parameters()
    enough = next((tp for size, tp in SIZES if whole <= size), job.node.gpus)
    tp = max(t for t in range(1, job.node.gpus + 1) if t <= enough and job.model.groups % t == 0 and job.gpus % t == 0)
    for pp in range(1, job.model.layers // STAGE_LAYERS + 1):
        layout = Layout(tp=tp, pp=pp, sp=tp > 1, ep=_experts(job, tp, pp), gbs=job.layout.gbs, recompute="selective")
        if job.gpus % (tp * pp) or legality.violations(job.replace(layout=layout)):
            continue
        if STATE_BYTES * whole / (tp * pp * (layout.ep if job.model.is_moe else 1)) > SHARE * job.node.gpu.hbm_gb * 1e9:
            continue
        return Rules(layout, *_pipeline(job.replace(layout=layout)))
    raise UserError(
        f"the textbook rules find no layout for {job.model.name} on {job.gpus} GPUs: with tp {tp}, no pipeline with "
        f"at least {STAGE_LAYERS} layers per stage fits {STATE_BYTES} bytes per parameter",
        "the search may find one: it also shards the optimizer and uses uneven stages",
    )


def _experts(job: PlannedJob, tp: int, pp: int) -> int:
    """Expert parallelism: the largest divisor of the experts up to 8, of the GPUs that tp and pp leave."""
    if not job.model.is_moe:
        return 1
    room = max(1, job.gpus // (tp * pp))
    return max(e for e in range(1, job.model.experts + 1) if job.model.experts % e == 0 and room % e == 0 and e <= 8)


def _pipeline(job: PlannedJob) -> tuple[float, tuple[str, ...]]:
    p, m = job.layout.pp, job.micro_batches
    bubble = (p - 1) / (m + p - 1)
    notes = []
    if m < 4 * (p - 1):
        notes.append(f"{m} micro-batches are fewer than 4(p - 1) = {4 * (p - 1)}: the rules recommend a larger batch")
    if bubble > 0.1:
        notes.append(f"its bubble is {bubble:.0%} of the step; the rules recommend at most 10 %")
    return bubble, tuple(notes)
