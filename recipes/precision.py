"""Number formats: the `MegatronMixedPrecision` plugin and the optimizer flags that belong to it."""

from __future__ import annotations

import nemo_run as run
import torch
from nemo.lightning.pytorch.plugins.mixed_precision import MegatronMixedPrecision

from superpod.planner.errors import UserError

# Gradients are reduced in FP32 everywhere: at thousands of ranks a BF16 sum loses what small gradients add.
_FORMATS = {
    "bf16": {"precision": "bf16-mixed", "dtype": torch.bfloat16},
    "fp32": {"precision": "32", "dtype": torch.float32},
}


def apply(partial: run.Partial, precision: str) -> None:
    """Train in `precision`; a recipe's name ends with it.

    Raises:
        UserError: when no plugin is written for that precision.
    """
    if precision not in _FORMATS:
        raise UserError(f"no recipe is written for precision {precision!r}", f"known: {', '.join(_FORMATS)}")
    dtype = _FORMATS[precision]["dtype"]
    partial.trainer.plugins = run.Config(
        MegatronMixedPrecision,
        precision=_FORMATS[precision]["precision"],
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_enabled=False,
        grad_reduce_in_fp32=True,
    )
    partial.trainer.strategy.pipeline_dtype = dtype
    partial.trainer.strategy.ddp.grad_reduce_in_fp32 = True
    partial.optim.config.bf16 = precision != "fp32"
