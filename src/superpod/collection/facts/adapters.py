"""Choose the layers of a model with LoRA or DoRA adapters, and the rank of the adapters."""

from __future__ import annotations

from superpod.planner.models import ModelShape


def adapter_targets(shape: ModelShape, task: str) -> tuple[str, ...]:
    """Return the names of the linear layers with adapters: all in a dense model, those of attention in an MoE model.

    NeMo 2.7.3's recipes select the same layers. `SPLIT_INPUTS` and `DUPLICATED_LAYERS` are excluded for DoRA, and
    `NORMED_LAYERS` for models with norms after projections.
    """
    excluded: tuple[str, ...] = ()
    if task == "dora":
        excluded += (*SPLIT_INPUTS, *DUPLICATED_LAYERS)
    if shape.post_norms:
        excluded += NORMED_LAYERS
    return tuple(name for name in _list_linear_layers(shape) if name not in excluded)


SPLIT_INPUTS = ("linear_proj", "linear_fc2")
"""Row-parallel layers: NeMo 2.7.3's DoRA uses the norm over a rank's columns as the norm of the entire row, so the
magnitudes would differ between ranks."""
NORMED_LAYERS = ("linear_proj", "linear_fc2")
"""Layers with an internal norm in NeMo 2.7.3's Gemma 2 and 3 (gemma2.py:611). The adapter is added after the norm, and
norm(Wx) + BAx cannot be merged into a weight."""
DUPLICATED_LAYERS = ("linear_q_down_proj", "linear_kv_down_proj")
"""Layers that are replicated on every rank; NeMo's DoRA raises an error there, because it adds only a rank's rows of
the adapter (peft/utils.py:319, dora.py:92)."""


def _list_linear_layers(shape: ModelShape) -> tuple[str, ...]:
    """Return the names of the linear layers in which adapters are possible."""
    if shape.kv_lora:
        queries = ("linear_q_down_proj", "linear_q_up_proj") if shape.q_lora else ("linear_q_proj",)
        return (*queries, "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")
    attention = ("linear_qkv", "linear_proj")
    return attention if shape.is_moe else (*attention, "linear_fc1", "linear_fc2")


RANK_16_FROM = 60e9
"""Minimum number of parameters of dense models whose adapters have rank 16."""


def adapter_rank(shape: ModelShape) -> int:
    """Return the rank of a model's adapters in NeMo 2.7.3's recipes.

    It is 8, for large models 16 (llama3_8b.py:305, llama3_70b.py:322), and for MoE models, in which only attention has
    adapters, 32 (mixtral_8x7b.py:293).
    """
    if shape.is_moe:
        return 32
    return 16 if shape.parameters().total >= RANK_16_FROM else 8
