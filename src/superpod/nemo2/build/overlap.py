"""Communication hidden behind computation: data-parallel reduce and gather, pipeline sends, TP userbuffers."""

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
    """Add the overlap callback and switch on what this layout and its planned `options` can overlap.

    NeMo's callback decides on pipeline overlap by vp; this sets what the callback leaves open.
    """
    ddp = partial.trainer.strategy.ddp
    ddp.overlap_grad_reduce = True
    ddp.overlap_param_gather = layout.sharding != "none" and options.overlap_params
    overlapped = layout.tp > 1 and layout.sp and options.overlap_tp
    callback = run.Config(MegatronCommOverlapCallback, tp_comm_overlap=overlapped)
    if not options.overlap_params:
        callback.overlap_param_gather = False  # it would switch the overlap on again, in its setup
    if callback.tp_comm_overlap:
        tuned = _userbuffers(partial, layout, recipe)
        if tuned is not None:
            callback.tp_comm_overlap_cfg = tuned
    partial.trainer.callbacks.append(callback)


def _userbuffers(partial: run.Partial, layout: Layout, recipe: Recipe) -> run.Config | None:
    """NVIDIA's tuned overlap of each linear layer, where NeMo has one for this shape; None = TE's default.

    NeMo has tables of one GPU of a generation. Its others have the same Tensor Cores and NVLink, so they take them.
    """
    kind = "bf16" if recipe.precision == "bf16" else "fp8"
    hidden, tail = partial.model.config.hidden_size, f"_mbs{layout.mbs}_seqlen{recipe.seq}"
    for gpu in alike(recipe.gpu):
        shape = f"userbuffers_{kind}_{gpu}_h{hidden}_tp{layout.tp}"
        for name in (f"{shape}_cp{layout.cp}{tail}", f"{shape}{tail}"):
            if hasattr(userbuffers, name):
                return fdl_dc.convert_dataclasses_to_configs(getattr(userbuffers, name))
    return None


def alike(gpu: str) -> list[str]:
    """A GPU, and then the others of its generation."""
    gpus = hardware.builtin().gpus
    return [gpu, *(name for name, other in gpus.items() if other.generation == gpus[gpu].generation and name != gpu)]
