"""Run the checks of Megatron, NeMo and Lightning by building parts of a configuration. This takes milliseconds.

Switches that need GPU software are first turned off in a copy, because a missing Transformer Engine is not an error of
the configuration.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

from superpod.nemo2.validation.reading import Reader
from superpod.planner.rules.rules import Violation

PARTS = (
    *("model.config", "optim.config", "optim.lr_scheduler", "trainer.strategy.ddp", "trainer.plugins"),
    *("log.ckpt", "peft"),
)
"""Parts that can be built without a GPU, files or other ranks."""

NEEDS_GPU_SOFTWARE = (
    *("apply_rope_fusion", "use_precision_aware_optimizer", "moe_permute_fusion", "moe_router_fusion"),
    "moe_router_padding_for_fp8",
)
"""Switches whose checks import Transformer Engine."""

DEPENDENT_FIELDS = {
    "use_precision_aware_optimizer": ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype", "main_params_dtype"),
    "moe_router_padding_for_fp8": ("fp8",),
}
"""Switch -> fields that are only valid with it, and are unset when it is turned off."""

MISSING_SOFTWARE = (
    *("Transformer Engine", "transformer-engine", "TransformerEngine", "TE >=", "apex", "No module named"),
    "not compiled with CUDA",
)
"""Parts of error messages that are caused by this machine, not by the configuration."""


def violations(r: Reader) -> Iterator[Violation]:
    """Yield the errors that the libraries raise when the `PARTS` of a configuration are built."""
    import fiddle as fdl

    for path in PARTS:
        part = r[path]
        if not isinstance(part, fdl.Buildable):
            continue
        message = _build_error(disable_gpu_software(part))
        if message:
            name = fdl.get_callable(part).__name__
            yield Violation("built", f"{name} rejects {path}: {message}", f"check the overrides of {path}")


def disable_gpu_software(part: Any) -> Any:
    """Return a copy of part of a configuration, without the switches whose checks need GPU software."""
    part = copy.deepcopy(part)
    for name in NEEDS_GPU_SOFTWARE:
        is_enabled = getattr(part, name, None)
        if is_enabled:
            for dependent in DEPENDENT_FIELDS.get(name, ()):
                if dependent in part.__arguments__:
                    delattr(part, dependent)
        if is_enabled or name in part.__arguments__:
            setattr(part, name, False)
    return part


def first_line(error: Exception) -> str:
    """Return the first line of a library's error message, without the context that fiddle adds."""
    text = str(error).partition("\n\nFiddle context")[0].strip()
    return text.splitlines()[0] if text else type(error).__name__


def is_missing_software(text: str) -> bool:
    """Return whether a missing package of this machine causes an error message, not the configuration."""
    return any(part in text for part in MISSING_SOFTWARE)


def _build_error(part: Any) -> str:
    """Return the first line of the error that building `part` raises; "" if none, or if this machine causes it."""
    import fiddle as fdl

    # The libraries log each value that they derive; only their exceptions are of interest.
    logging.disable(logging.CRITICAL)
    try:
        fdl.build(part)
    except ImportError:
        return ""
    except Exception as error:  # each library raises its own types
        return "" if is_missing_software(str(error)) else first_line(error)
    finally:
        logging.disable(logging.NOTSET)
    return ""
