"""Number formats: the `MegatronMixedPrecision` plugin and the optimizer flags that belong to it."""

from __future__ import annotations

from typing import Any

import nemo_run as run
import torch
from nemo.lightning.pytorch.plugins.mixed_precision import MegatronMixedPrecision

from superpod.errors import UserError

PLAIN = {
    "bf16": {"precision": "bf16-mixed", "dtype": torch.bfloat16},
    "fp16": {"precision": "16-mixed", "dtype": torch.float16},
    "fp32": {"precision": "32", "dtype": torch.float32},
}

FP8: dict[str, dict[str, Any]] = {
    # One scale a tensor, from the largest values of the last 1,024 steps.
    "fp8ds": {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"},
    # One scale a tensor, from its own values; the first and the last layer stay in BF16, where errors cost most.
    "fp8cs": {
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 1,
    },
    # One scale for each 128 x 128 of a weight and 1 x 128 of an activation: DeepSeek V3's recipe.
    "fp8bw": {"fp8": "hybrid", "fp8_recipe": "blockwise"},
    # One power-of-two scale for each 32 values, in Blackwell's tensor cores.
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}
"""What is set above BF16: the recipes of NeMo 2.7.3's mixed_precision.py, which NVIDIA's published runs use."""


def apply(partial: run.Partial, precision: str, *, fp8_params: bool = False, bf16_ends: int = 1) -> None:
    """Make `partial` train in `precision`, the last part of a recipe's name; `fp8_params`: parameters themselves too.

    `bf16_ends` is `ModelShape.bf16_ends`.

    Raises:
        UserError: when recipes cannot train in that precision.
    """
    if precision not in PLAIN | FP8:
        raise UserError(f"no recipe is written for precision {precision!r}", f"known: {', '.join(PLAIN | FP8)}")
    plain = PLAIN["bf16" if precision in FP8 else precision]
    plugin = run.Config(
        MegatronMixedPrecision,
        precision=plain["precision"],
        params_dtype=plain["dtype"],
        pipeline_dtype=plain["dtype"],
        autocast_enabled=False,
        grad_reduce_in_fp32=True,  # at thousands of ranks a 16-bit sum loses small gradients
    )
    for key, value in FP8.get(precision, {}).items():
        setattr(plugin, key, value)
    if bf16_ends > 1 and precision in ("fp8cs", "fp8bw"):  # NeMo's recipes of hybrids, with either scaling
        plugin.first_last_layers_bf16 = True
        plugin.num_layers_at_start_in_bf16 = plugin.num_layers_at_end_in_bf16 = bf16_ends
    if precision in FP8:
        plugin.fp8_param_gather = fp8_params
        if precision == "mxfp8" and fp8_params:
            # The only way that MXFP8 parameters are gathered; `planned_job.settled` says what else it takes.
            plugin.reuse_grad_buf_for_mxfp8_param_ag = True
    partial.trainer.plugins = plugin
    partial.trainer.strategy.pipeline_dtype = plain["dtype"]
    partial.trainer.strategy.ddp.grad_reduce_in_fp32 = True
    if precision == "fp16":
        # NeMo 2.7.3 divides gradients by the loss scale and never multiplies the loss (grad_scale_func is not set):
        # from its 2^32 on, a dynamic scale would leave nothing of them.
        plugin.fp16_loss_scale = 1.0
        partial.trainer.strategy.ddp.check_for_nan_in_grad = False  # a step that overflows is left out
    partial.optim.config.bf16 = plain["dtype"] is torch.bfloat16
    partial.optim.config.fp16 = plain["dtype"] is torch.float16
