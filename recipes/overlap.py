"""Communication hidden behind computation: data-parallel reduce and gather, pipeline sends, TP userbuffers."""

from __future__ import annotations

import nemo_run as run
from fiddle.experimental import dataclasses as fdl_dc
from nemo.collections.llm.recipes.tp_overlap_configs import userbuffers
from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback

from superpod.planner.layout import Layout
from superpod.recipes.planned_job import overlaps_tp
from superpod.recipes.registry import Recipe


def apply(partial: run.Partial, layout: Layout, recipe: Recipe) -> None:
    """Add the overlap callback and switch on what this layout can overlap.

    NeMo's callback decides on pipeline overlap by vp; this sets what the callback leaves open.
    """
    ddp = partial.trainer.strategy.ddp
    ddp.overlap_grad_reduce = True
    ddp.overlap_param_gather = layout.sharding != "none"
    overlapped = layout.tp > 1 and layout.sp and overlaps_tp(recipe.task, recipe.precision, recipe.shape)
    callback = run.Config(MegatronCommOverlapCallback, tp_comm_overlap=overlapped)
    if callback.tp_comm_overlap:
        tuned = _userbuffers(partial, layout, recipe)
        if tuned is not None:
            callback.tp_comm_overlap_cfg = tuned
    partial.trainer.callbacks.append(callback)


def _userbuffers(partial: run.Partial, layout: Layout, recipe: Recipe) -> run.Config | None:
    """NVIDIA's tuned overlap of each linear layer, where NeMo has one for this shape; None = TE's default."""
    kind = "bf16" if recipe.precision in ("bf16", "fp16") else "fp8"
    shape = f"userbuffers_{kind}_{recipe.gpu}_h{partial.model.config.hidden_size}_tp{layout.tp}"
    tail = f"_mbs{layout.mbs}_seqlen{recipe.seq}"
    for name in (f"{shape}_cp{layout.cp}{tail}", f"{shape}{tail}"):
        if hasattr(userbuffers, name):
            return fdl_dc.convert_dataclasses_to_configs(getattr(userbuffers, name))
    return None
