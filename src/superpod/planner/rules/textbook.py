"""Choose a layout by the textbook rules, for comparison with a search.

These are the commonly taught rules (arXiv:2104.04473 section 3; performance guides of Megatron-LM and NeMo): tensor
parallelism within a node only, pipeline stages of at least four layers until the model states fit, at least 4(p - 1)
micro-batches to keep the bubble small, and data parallelism for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from superpod.errors import UserError
from superpod.planner import legality
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob

STATE_BYTES = 18
"""Bytes per parameter: BF16 weights, FP32 gradients, FP32 Adam states (Megatron without distributed optimizer)."""
STATES_FRACTION = 0.6
"""Fraction of the GPU memory for these states; the rest is for activations."""
STAGE_LAYERS = 4
"""Minimum number of layers per stage."""
SIZES = ((3e9, 1), (8e9, 2), (20e9, 4))
"""(maximum number of parameters, tp); for larger models, tp is the number of GPUs per node."""


@dataclass(frozen=True)
class Rules:
    """The layout that the textbook rules choose, and notes on its pipeline."""

    layout: Layout
    bubble: float
    """Pipeline bubble as a fraction of the step: (p - 1) / (m + p - 1)."""
    notes: tuple[str, ...]


def choose(job: PlannedJob) -> Rules:
    """Choose a layout for a run by the textbook rules; of `job.layout`, only gbs is used.

    Raises:
        UserError: the rules find no legal layout.
    """
    parameters = job.model.total_parameters()
    enough = next((tp for size, tp in SIZES if parameters <= size), job.node.gpus)
    tp = max(t for t in range(1, job.node.gpus + 1) if t <= enough and job.model.groups % t == 0 and job.gpus % t == 0)
    for pp in range(1, job.model.layers // STAGE_LAYERS + 1):
        layout = Layout(tp=tp, pp=pp, sp=tp > 1, ep=_choose_ep(job, tp, pp), gbs=job.layout.gbs, recompute="selective")
        if job.gpus % (tp * pp) or legality.violations(job.replace(layout=layout)):
            continue
        state_bytes = STATE_BYTES * parameters / (tp * pp * layout.ep)
        if state_bytes <= STATES_FRACTION * job.node.gpu.hbm_gb * 1e9:
            return Rules(layout, *_rate_pipeline(job.replace(layout=layout)))
    raise UserError(
        f"the textbook rules find no layout for {job.model.name} on {job.gpus} GPUs: with tp {tp}, no pipeline with "
        f"at least {STAGE_LAYERS} layers per stage has memory for {STATE_BYTES} bytes per parameter",
        "the search may find one: it also shards the optimizer and uses uneven stages",
    )


def _choose_ep(job: PlannedJob, tp: int, pp: int) -> int:
    """Return ep: the largest common divisor, at most 8, of the number of experts and of gpus / (tp x pp)."""
    if not job.model.is_moe:
        return 1
    ranks = max(1, job.gpus // (tp * pp))
    return max(e for e in range(1, job.model.experts + 1) if job.model.experts % e == 0 and ranks % e == 0 and e <= 8)


def _rate_pipeline(job: PlannedJob) -> tuple[float, tuple[str, ...]]:
    """Return the bubble as a fraction of the step, and the recommendations that the pipeline violates."""
    p, m = job.layout.pp, job.micro_batches
    bubble = (p - 1) / (m + p - 1)
    notes = []
    if m < 4 * (p - 1):
        notes.append(f"{m} micro-batches are fewer than 4(p - 1) = {4 * (p - 1)}: the rules recommend a larger batch")
    if bubble > 0.1:
        notes.append(f"its bubble is {bubble:.0%} of the step; the rules recommend at most 10 %")
    return bubble, tuple(notes)
