"""What NeMo 2.7.3's own attention classes do wrong, mended on a built model: for conversion, generate and perplexity.

Gemma 2: NeMo's class puts the window into the even layers, counted from one, and has it only where a mask is handed in;
transformers has it in the odd ones (modeling_gemma2.py, `layer_types`). Training takes NeMo's own class: `finetune`
refuses sequences longer than the window. The epsilon of its post-norms is mended in training too (`post_norms`).
Gemma 3: Megatron-Core 0.15 calls attention with `rotary_pos_cos_sin`, which NeMo's class does not take. Training ends
in a TypeError at its first step, as the recipes' proof says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from superpod.common import post_norms

if TYPE_CHECKING:
    from torch import nn


def apply_fixes(core: nn.Module) -> None:
    """Mend a Megatron model in place; a second call changes nothing. Needs NeMo."""
    from nemo.collections.llm.gpt.model import gemma2, gemma3

    post_norms.set_epsilon(core)
    modules: list[Any] = [module for module in core.modules() if not hasattr(module, "mended")]
    for module in modules:
        if isinstance(module, gemma2.Gemma2DotProductAttention):
            _gemma2_window(module)
        elif isinstance(module, gemma3.Gemma3SelfAttention):
            module.register_forward_pre_hook(_without_cos_sin, with_kwargs=True)
            _mark(module)


def _gemma2_window(module: Any) -> None:
    from megatron.core.transformer.utils import is_layer_window_attention

    config = module.config
    on = module.window_size is not None  # NeMo's own places, where the configuration names none
    if config.window_attn_skip_freq is not None:
        on = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, module.layer_number)
    module.window_size = tuple(config.window_size) if on else None
    if on:
        module.register_forward_pre_hook(_with_mask, with_kwargs=True)
    _mark(module)


def _mark(module: Any) -> None:
    module.mended = True


def _without_cos_sin(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if kwargs.get("rotary_pos_cos_sin") is None:
        kwargs.pop("rotary_pos_cos_sin", None)
    return args, kwargs


def _with_mask(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A mask where there is none, without which NeMo's class leaves the window out; it then makes its own."""
    import torch

    query, key, value, *rest = args
    if rest and rest[0] is None:
        rest[0] = torch.zeros(1, 1, query.size(0), key.size(0), dtype=torch.bool, device=query.device)
    return (query, key, value, *rest), kwargs
