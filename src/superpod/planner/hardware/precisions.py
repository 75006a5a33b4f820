"""Names of precisions, and their spellings in other tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from superpod.planner.hardware.devices import Gpu

PLAIN = ("fp32", "tf32", "bf16", "fp16")
"""Precisions without scaling factors."""
SCALED = ("fp8ds", "fp8cs", "fp8bw", "mxfp8", "nvfp4")
"""Precisions with scaling factors: FP8 with delayed, current and blockwise scaling; MXFP8; NVFP4."""
PRECISIONS = (*PLAIN, *SCALED)
AUTO_PRECISIONS = ("bf16", "fp8cs", "mxfp8")
"""Precisions that `--precision auto` tries if the GPU supports them: pretraining uses them without loss of accuracy."""

PRECISION_ALIASES = {
    "fp8-ds": "fp8ds",
    "fp8-delayed": "fp8ds",
    "fp8-cs": "fp8cs",
    "fp8 current scaling": "fp8cs",
    "fp8 (torchao float8)": "fp8cs",  # torchao scales each tensor by its current maximum
    "float8": "fp8cs",
    "fp8-sc": "fp8bw",  # Megatron-Bridge's "sub-channel"
    "fp8-bw": "fp8bw",
    "fp8 blockwise": "fp8bw",
    "fp8-mx": "mxfp8",
    "fp8_mx": "mxfp8",
    "nvfp4": "nvfp4",
    "fp8": "fp8",  # scaling not specified: delayed until mid-2025, later current on Hopper
}
"""Other spellings of precisions, in lower case. `fp8` stays: only the caller knows which scaling it means."""


def auto_precisions(gpu: Gpu) -> list[str]:
    """Return the precisions that `--precision auto` tries on a GPU: those of AUTO_PRECISIONS that it supports."""
    return [name for name in AUTO_PRECISIONS if name in gpu.precisions]


def precision(text: str) -> str:
    """Return the canonical name of a precision: one of `PRECISIONS`, or `fp8` if the scaling is not specified.

    The precision may be part of a longer text: `BF16, dist-opt (ZeRO-1)` is bf16, `FSDP+CP+compile+Float8` is fp8cs.

    Raises:
        UserError: the text contains no known precision.
    """
    low = text.strip().lower()
    words = [low, low.split(",")[0].strip(), *low.replace("+", " ").replace(",", " ").split()]
    for word in words:
        if word in PRECISIONS or word in PRECISION_ALIASES:
            return PRECISION_ALIASES.get(word, word)
    if low == "auto":
        hint = "select one, such as bf16; plan, fit, scale and cost accept auto where they choose the layout"
        raise UserError("precision auto applies only to a search over layouts", hint)
    known_names = [*PRECISIONS, *PRECISION_ALIASES]
    raise UserError(
        f"there is no precision {text!r}", did_you_mean(low, known_names) or f"known: {', '.join(PRECISIONS)}"
    )
