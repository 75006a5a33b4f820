"""Set the epsilon of the post-projection norms of Gemma 2 and 3 in NeMo 2.7.3, for training and conversion.

TERowParallelLinearLayerNorm in gemma2.py of NeMo creates these norms without an epsilon, so that Transformer Engine
uses 1e-5 instead of the configured value (1e-6 for Gemma), which matters for small activations. Standard library only,
Python 3.9.
"""

from __future__ import annotations

from typing import Any


def set_epsilon(model: Any) -> None:
    """Set the epsilon of all norms `post_layernorm` in `model` to the configured `layernorm_epsilon`, in place."""
    for module in model.modules():
        norm: Any = getattr(module, "post_layernorm", None)
        if hasattr(norm, "eps"):
            norm.eps = module.config.layernorm_epsilon
