"""Set the number formats of a recipe: the `MegatronMixedPrecision` plugin and the matching optimizer flags."""

from __future__ import annotations

from typing import Any

import nemo_run as run
import torch
from nemo.lightning.pytorch.plugins.mixed_precision import MegatronMixedPrecision

from superpod.errors import UserError

DTYPES: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16-mixed", "dtype": torch.bfloat16},
    "fp16": {"precision": "16-mixed", "dtype": torch.float16},
    "fp32": {"precision": "32", "dtype": torch.float32},
}
"""Precision without FP8 -> precision of the plugin, and its data type."""

FP8: dict[str, dict[str, Any]] = {
    # Delayed scaling: one scale per tensor, from the maximum values of the last 1,024 steps.
    "fp8ds": {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"},
    # Current scaling: one scale per tensor, from its current values. The first and the last layer, which are most
    # sensitive to rounding errors, stay in BF16.
    "fp8cs": {
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 1,
    },
    # Blockwise scaling: one scale per 128 x 128 values of a weight or 1 x 128 of an activation, as in DeepSeek V3.
    "fp8bw": {"fp8": "hybrid", "fp8_recipe": "blockwise"},
    # Microscaling: one power-of-two scale per 32 values, in Blackwell's Tensor Cores.
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}
"""FP8 precision -> fields set in addition to those of BF16, as in NeMo 2.7.3 (mixed_precision.py) and NVIDIA's runs."""


def apply(partial: run.Partial, precision: str, *, fp8_params: bool = False, bf16_ends: int = 1) -> None:
    """Set the precision of a recipe.

    Args:
        partial: the recipe to change.
        precision: the last part of a recipe's name, such as fp8cs.
        fp8_params: whether parameters are stored and gathered in FP8.
        bf16_ends: number of layers at each end of the model that stay in BF16 (`ModelShape.bf16_ends`).

    Raises:
        UserError: the precision is unknown.
    """
    if precision not in DTYPES | FP8:
        raise UserError(f"unknown precision {precision!r}", f"choose from {', '.join(DTYPES | FP8)}")
    fields = DTYPES["bf16" if precision in FP8 else precision]
    plugin = run.Config(
        MegatronMixedPrecision,
        precision=fields["precision"],
        params_dtype=fields["dtype"],
        pipeline_dtype=fields["dtype"],
        autocast_enabled=False,
        grad_reduce_in_fp32=True,  # a 16-bit sum over thousands of ranks loses small gradients
    )
    for key, value in FP8.get(precision, {}).items():
        setattr(plugin, key, value)
    if bf16_ends > 1 and precision in ("fp8cs", "fp8bw"):  # as in NeMo's recipes for hybrid models
        plugin.first_last_layers_bf16 = True
        plugin.num_layers_at_start_in_bf16 = plugin.num_layers_at_end_in_bf16 = bf16_ends
    if precision in FP8:
        plugin.fp8_param_gather = fp8_params
        if precision == "mxfp8" and fp8_params:
            # MXFP8 parameters can only be gathered with this buffer; see `recipe_job.resolve_parameters`.
            plugin.reuse_grad_buf_for_mxfp8_param_ag = True
    partial.trainer.plugins = plugin
    partial.trainer.strategy.pipeline_dtype = fields["dtype"]
    partial.trainer.strategy.ddp.grad_reduce_in_fp32 = True
    if precision == "fp16":
        # NeMo 2.7.3 divides the gradients by the loss scale but never scales the loss (grad_scale_func is not set).
        # With a dynamic scale, which starts at 2^32, all gradients would underflow.
        plugin.fp16_loss_scale = 1.0
        partial.trainer.strategy.ddp.check_for_nan_in_grad = False  # the optimizer skips steps that overflow
    partial.optim.config.bf16 = fields["dtype"] is torch.bfloat16
    partial.optim.config.fp16 = fields["dtype"] is torch.float16
