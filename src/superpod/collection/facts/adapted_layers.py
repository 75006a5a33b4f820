"""Which linear layers of a model get adapters, and why others do not."""

from __future__ import annotations

from superpod.planner.models import ModelShape


def adapted(shape: ModelShape, task: str) -> tuple[str, ...]:
    """The linear layers that get adapters: all of a dense model, those of the attention in a model with experts.

    NeMo 2.7.3's recipes adapt the same. Latent attention has small projections down and up in place of `linear_qkv`.
    DoRA leaves out `SPLIT_INPUTS` and `DUPLICATED`, and a model with norms behind its projections `NORMED`.
    """
    left_out = (*SPLIT_INPUTS, *DUPLICATED) if task == "dora" else ()
    left_out += NORMED if shape.post_norms else ()
    return tuple(name for name in _adapted(shape) if name not in left_out)


SPLIT_INPUTS = ("linear_proj", "linear_fc2")
"""NeMo 2.7.3's DoRA takes the norm of a rank's columns for that of the whole row: ranks would differ in magnitudes."""
NORMED = ("linear_proj", "linear_fc2")
"""Gemma 2's and 3's classes of NeMo 2.7.3 norm inside these layers (gemma2.py:611), and the adapter is added behind it:
norm(Wx) + BAx is trained, which no merged weight computes."""
DUPLICATED = ("linear_q_down_proj", "linear_kv_down_proj")
"""Whole on every rank; NeMo's DoRA adds a rank's rows of the adapter (peft/utils.py:319, dora.py:92), which fails."""


def _adapted(shape: ModelShape) -> tuple[str, ...]:
    if shape.kv_lora:
        queries = ("linear_q_down_proj", "linear_q_up_proj") if shape.q_lora else ("linear_q_proj",)
        return (*queries, "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")
    attention = ("linear_qkv", "linear_proj")
    return attention if shape.is_moe else (*attention, "linear_fc1", "linear_fc2")
