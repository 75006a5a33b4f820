"""The precisions that hardware multiplies in, and how others spell them."""

from __future__ import annotations

from superpod.errors import UserError, did_you_mean

PLAIN = ("fp32", "tf32", "bf16", "fp16")
"""Precisions that scale nothing."""
SCALED = ("fp8ds", "fp8cs", "fp8bw", "mxfp8", "nvfp4")
"""Precisions that scale tensors or blocks: FP8 with delayed, current and blockwise scaling; MXFP8; NVFP4."""
PRECISIONS = (*PLAIN, *SCALED)

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
    "fp8": "fp8",  # the kind is not printed: delayed until mid-2025, current on Hopper later
}
"""Other spellings of precisions, in lower case. `fp8` stays as it is: only the caller can know which kind it means."""


def precision(text: str) -> str:
    """The name here of a precision: one of `PRECISIONS`, or `fp8` where the text does not say which kind.

    Free text is taken by its parts: `BF16, dist-opt (ZeRO-1)` is bf16, `FSDP+CP+compile+Float8` is fp8cs.

    Raises:
        UserError: when no precision is in it.
    """
    low = text.strip().lower()
    words = [low, low.split(",")[0].strip(), *low.replace("+", " ").replace(",", " ").split()]
    for word in words:
        if word in PRECISIONS or word in PRECISION_ALIASES:
            return PRECISION_ALIASES.get(word, word)
    known = [*PRECISIONS, *PRECISION_ALIASES]
    raise UserError(f"no precision is called {text!r}", did_you_mean(low, known) or f"known: {', '.join(PRECISIONS)}")
