"""Gemma 3 of NeMo 2.7.3 on Megatron-Core 0.15: its attention, taking the argument that Megatron's layers pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo.collections.llm.gpt.model.gemma3 import Gemma3Config1B, Gemma3SelfAttention, gemma3_layer_spec

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from torch import Tensor


class CosSinAttention(Gemma3SelfAttention):
    """Takes `rotary_pos_cos_sin`, which flash decoding alone gives, and training leaves None."""

    def forward(self, *args: Any, rotary_pos_cos_sin: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """NeMo's forward pass, without that argument."""
        if rotary_pos_cos_sin is not None:
            raise ValueError("Gemma 3 has two rotary embeddings, and flash decoding gives one")
        return super().forward(*args, **kwargs)


def layer_spec(config: Gemma3Config1B) -> ModuleSpec:
    """NeMo's layer with that attention."""
    spec = gemma3_layer_spec(config)
    spec.submodules.self_attention.module = CosSinAttention
    return spec


@dataclass
class CosSinConfig1B(Gemma3Config1B):
    """Gemma 3 1B with layers that Megatron-Core 0.15 can call."""

    transformer_layer_spec: Any = layer_spec
