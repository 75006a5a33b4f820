"""Corrects errors of NeMo 2.7.3's attention classes in a model, for conversion, `generate` and `perplexity`.

Gemma 2: NeMo's class applies the window to the even layers, counted from one, and only if a mask is passed;
transformers applies it to the odd layers (modeling_gemma2.py, `layer_types`). Training uses NeMo's class unchanged, so
`recipes finetune` rejects sequences longer than the window. `post_norms` corrects the epsilon of its post-norms, also
in training.

Gemma 3: Megatron-Core 0.15 calls attention with `rotary_pos_cos_sin`, which NeMo's class does not accept. Training ends
with a TypeError at the first step, as recorded in proven.json.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from superpod.runtime.rank import post_norms

if TYPE_CHECKING:
    from torch import nn

FIXED_ATTRIBUTE = "is_fixed"
"""Attribute of a corrected module."""


def apply_fixes(core: nn.Module) -> None:
    """Correct the attention of a Megatron model in place. A second call has no effect."""
    from nemo.collections.llm.gpt.model import gemma2, gemma3

    post_norms.set_epsilon(core)
    modules: list[Any] = [module for module in core.modules() if not hasattr(module, FIXED_ATTRIBUTE)]
    for module in modules:
        if isinstance(module, gemma2.Gemma2DotProductAttention):
            _set_gemma2_window(module)
            setattr(module, FIXED_ATTRIBUTE, True)
        elif isinstance(module, gemma3.Gemma3SelfAttention):
            module.register_forward_pre_hook(_remove_cos_sin, with_kwargs=True)
            setattr(module, FIXED_ATTRIBUTE, True)


def _set_gemma2_window(module: Any) -> None:
    from megatron.core.transformer.utils import is_layer_window_attention

    config = module.config
    is_windowed = module.window_size is not None  # NeMo's default, if the configuration does not specify the layers
    if config.window_attn_skip_freq is not None:
        is_windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, module.layer_number)
    module.window_size = tuple(config.window_size) if is_windowed else None
    if is_windowed:
        module.register_forward_pre_hook(_add_mask, with_kwargs=True)


def _remove_cos_sin(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if kwargs.get("rotary_pos_cos_sin") is None:
        kwargs.pop("rotary_pos_cos_sin", None)
    return args, kwargs


def _add_mask(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add an attention mask to the arguments of a forward pass; without one, NeMo's class ignores the window."""
    import torch

    query, key, value, *rest = args
    if rest and rest[0] is None:
        rest[0] = torch.zeros(1, 1, query.size(0), key.size(0), dtype=torch.bool, device=query.device)
    return (query, key, value, *rest), kwargs
