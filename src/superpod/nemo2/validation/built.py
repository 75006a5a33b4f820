"""Megatron's, NeMo's and Lightning's own checks: the parts of a configuration are really built, in milliseconds.

What only a GPU's software can answer is switched off first in a copy: a machine without Transformer Engine is no
mistake of the configuration.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

from superpod.nemo2.validation.reading import Reader
from superpod.planner.rules.rules import Violation

PARTS = {
    "model.config": "look at the overrides of model.config",
    "optim.config": "look at the overrides of optim.config",
    "optim.lr_scheduler": "look at the overrides of optim.lr_scheduler",
    "trainer.strategy.ddp": "look at the overrides of trainer.strategy.ddp",
    "trainer.plugins": "look at the overrides of trainer.plugins",
    "log.ckpt": "look at the overrides of log.ckpt",
    "peft": "look at the overrides of peft",
}
"""Parts that need no GPU, no file and no other rank, and what to look at when one refuses."""

NEEDS_GPU_SOFTWARE = ("apply_rope_fusion", "use_precision_aware_optimizer", "moe_permute_fusion", "moe_router_fusion")
"""Switches whose check asks for Transformer Engine itself."""

PRECISION_AWARE = ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype", "main_params_dtype")
"""Fields that need the precision-aware optimizer; without it in the copy, they go with it."""

ABSENT = (
    *("Transformer Engine", "transformer-engine", "TransformerEngine", "TE >=", "apex", "No module named"),
    "not compiled with CUDA",
)
"""Words of a refusal that is the machine's, not the configuration's."""


def violations(r: Reader) -> Iterator[Violation]:
    """What the libraries refuse as they build the parts."""
    import fiddle as fdl

    for path, fix in PARTS.items():
        part = r[path]
        if not isinstance(part, fdl.Buildable):
            continue
        if message := _refusal(without_gpu_software(part)):
            yield Violation("built", f"{fdl.get_callable(part).__name__} refuses {path}: {message}", fix)


def without_gpu_software(part: Any) -> Any:
    """A copy of a part's configuration with the switches off whose check asks for a GPU's software."""
    part = copy.deepcopy(part)
    for name in NEEDS_GPU_SOFTWARE:
        if name in part.__arguments__ or getattr(part, name, None):
            if getattr(part, name) and name == "use_precision_aware_optimizer":
                _forget(part, PRECISION_AWARE)
            setattr(part, name, False)
    return part


def first_line(error: Exception) -> str:
    """The first line of what a library says, without fiddle's description of where."""
    text = str(error).partition("\n\nFiddle context")[0].strip()
    return text.splitlines()[0] if text else type(error).__name__


def is_of_this_machine(text: str) -> bool:
    """Whether a refusal is this machine's, which lacks a package, and not the configuration's."""
    return any(word in text for word in ABSENT)


def _forget(part: Any, fields: tuple[str, ...]) -> None:
    for name in fields:
        if name in part.__arguments__:
            delattr(part, name)


def _refusal(part: Any) -> str:
    """The first line of what building `part` raises; "" where it is built."""
    import fiddle as fdl

    logging.disable(logging.CRITICAL)
    try:
        fdl.build(part)
    except ImportError:
        return ""
    except Exception as error:  # each library has exceptions of its own
        line = first_line(error)
        return "" if is_of_this_machine(str(error)) else line
    finally:
        logging.disable(logging.NOTSET)
    return ""
