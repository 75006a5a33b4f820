"""Overlap communication with computation: data-parallel collectives, pipeline sends, TP with userbuffers."""

from __future__ import annotations

import nemo_run as run
from fiddle.experimental import dataclasses as fdl_dc
from nemo.collections.llm.recipes.tp_overlap_configs import userbuffers
from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback

from superpod.collection.registry import Recipe
from superpod.planner import hardware
from superpod.planner.layout import Layout
from superpod.planner.planned_job import Options


def apply(partial: run.Partial, layout: Layout, recipe: Recipe, options: Options) -> None:
    """Add NeMo's overlap callback to a recipe, and enable each overlap that the layout and its `options` allow.

    The callback enables the overlap of pipeline sends if the layout has virtual stages.
    """
    ddp = partial.trainer.strategy.ddp
    ddp.overlap_grad_reduce = True
    ddp.overlap_param_gather = layout.sharding != "none" and options.overlap_params
    overlaps_tp = layout.tp > 1 and layout.sp and options.overlap_tp
    callback = run.Config(MegatronCommOverlapCallback, tp_comm_overlap=overlaps_tp)
    if not options.overlap_params:
        callback.overlap_param_gather = False  # otherwise, the callback's setup would enable it again
    if callback.tp_comm_overlap:
        tuned_config = _find_userbuffer_config(partial, layout, recipe)
        if tuned_config is not None:
            callback.tp_comm_overlap_cfg = tuned_config
    partial.trainer.callbacks.append(callback)


def _find_userbuffer_config(partial: run.Partial, layout: Layout, recipe: Recipe) -> run.Config | None:
    """Return NeMo's tuned userbuffer configuration for a recipe's shape and layout; None if NeMo has none.

    NeMo has configurations for one GPU of each generation. They also apply to the other GPUs of the generation, whose
    Tensor Cores and NVLink are the same.
    """
    kind = "bf16" if recipe.precision == "bf16" else "fp8"
    hidden, suffix = partial.model.config.hidden_size, f"_mbs{layout.mbs}_seqlen{recipe.seq}"
    for gpu in same_generation_gpus(recipe.gpu):
        shape = f"userbuffers_{kind}_{gpu}_h{hidden}_tp{layout.tp}"
        for name in (f"{shape}_cp{layout.cp}{suffix}", f"{shape}{suffix}"):
            if hasattr(userbuffers, name):
                return fdl_dc.convert_dataclasses_to_configs(getattr(userbuffers, name))
    return None


def same_generation_gpus(gpu: str) -> list[str]:
    """Return the names of a GPU and of the other GPUs of its generation, in this order."""
    gpus = hardware.builtin().gpus
    return [gpu, *(name for name, other in gpus.items() if other.generation == gpus[gpu].generation and name != gpu)]
