"""Attention for NeMo 2.7.3's Gemma 3 that accepts the arguments of Megatron-Core 0.15."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo.collections.llm.gpt.model.gemma3 import Gemma3Config1B, Gemma3SelfAttention, gemma3_layer_spec

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from torch import Tensor


class CosSinAttention(Gemma3SelfAttention):
    """Gemma 3 attention that accepts `rotary_pos_cos_sin`, which is None except in flash decoding."""

    def forward(self, *args: Any, rotary_pos_cos_sin: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the result of NeMo's forward pass; raise ValueError if `rotary_pos_cos_sin` is not None."""
        if rotary_pos_cos_sin is not None:
            raise ValueError("flash decoding is not supported: it passes one rotary embedding, but Gemma 3 has two")
        return super().forward(*args, **kwargs)


def layer_spec(config: Gemma3Config1B) -> ModuleSpec:
    """Return NeMo's layer specification for Gemma 3, with `CosSinAttention`."""
    spec = gemma3_layer_spec(config)
    spec.submodules.self_attention.module = CosSinAttention
    return spec


@dataclass
class CosSinConfig1B(Gemma3Config1B):
    """Gemma 3 1B with `CosSinAttention`."""

    transformer_layer_spec: Any = layer_spec
