"""NeMo 2.7.3's norms behind a projection, of Gemma 2 and 3: training and conversion give both the model's own epsilon.

gemma2.py, TERowParallelLinearLayerNorm makes them without one, so that Transformer Engine takes 1e-5, whatever the
configuration says (Gemma's is 1e-6). It matters where activations are small. Standard library only, Python 3.9.
"""

from __future__ import annotations

from typing import Any


def set_epsilon(model: Any) -> None:
    """Set the epsilon of these norms to `layernorm_epsilon`, in place; a second call changes nothing."""
    for module in model.modules():
        norm: Any = getattr(module, "post_layernorm", None)
        if hasattr(norm, "eps"):
            norm.eps = module.config.layernorm_epsilon
