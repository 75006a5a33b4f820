"""Maps each tensor of a Megatron model to tensors of a Hugging Face model, in both directions.

A Megatron tensor without a rule is an error. Experts may have one GEMM each, or be grouped by Transformer Engine or by
Megatron. Shapes: h heads, g query groups, d channels per head, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Join = Callable[[Sequence["Tensor"]], "Tensor"]
Split = Callable[["Tensor"], Sequence["Tensor"]]


@dataclass(frozen=True)
class Piece:
    """A Hugging Face tensor, or its part [expert] if it contains all experts."""

    name: str
    expert: int | None = None


@dataclass(frozen=True)
class Rule:
    """Conversion rule of a Megatron tensor: `join` combines Hugging Face tensors into it, `split` is the inverse."""

    pieces: tuple[Piece, ...]
    join: Join
    split: Split


class UnmappedError(ValueError):
    """The Hugging Face model has no counterpart for some tensors of the Megatron model."""


def build_rules(names: Iterable[str], config: Any, kind: str) -> dict[str, Rule]:
    """Return the conversion rule for each Megatron tensor by name.

    Args:
        names: names of Megatron's parameters and saved buffers.
        config: Megatron's configuration of the model.
        kind: `model_type` of the Hugging Face folder.

    Raises:
        UnmappedError: there is no rule for a tensor.
    """
    table: dict[str, Rule] = {}
    missing: list[str] = []
    for name in names:
        rule = _find_rule(name, config, kind)
        if rule is None:
            missing.append(name)
        else:
            table[name] = rule
    if missing:
        raise UnmappedError(f"{kind} has no counterpart for {', '.join(missing[:8])}")
    return table


OUTER_NAMES = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "decoder.final_layernorm.bias": "model.norm.bias",
    "output_layer.weight": "lm_head.weight",
}

LAYER_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "input_layernorm.bias",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "self_attention.core_attention.softmax_offset": "self_attn.sinks",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_bias": "post_attention_layernorm.bias",
}
"""Names after `decoder.layers.N.` and `model.layers.N.`."""

QK_NORMS = {
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
LATENT = {
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
}
"""Multi-latent attention and DeepSeek's router."""
POST_NORMS = {
    "self_attention.linear_proj.post_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_feedforward_layernorm.weight",
    "mlp.linear_fc2.post_layernorm.weight": "post_feedforward_layernorm.weight",
}
"""Gemma 2 and 3."""
SPECIAL: dict[str, dict[str, str]] = {
    "gemma2": POST_NORMS,
    "gemma3_text": POST_NORMS | QK_NORMS,
    "qwen3": QK_NORMS,
    "qwen3_moe": QK_NORMS,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
}
"""model_type -> names that take precedence over `LAYER_NAMES`."""
ROUTERS = {"mixtral": "block_sparse_moe.gate", "gpt_oss": "mlp.router"}
EXPERTS = {"mixtral": ("block_sparse_moe.experts", "w1", "w3", "w2")}
"""model_type -> prefix of the experts, and the names of their gate, up and down projections."""
GATE_AND_UP = {"starcoder2": ("mlp.c_fc",), "nemotron": ("mlp.up_proj",), "phi3": ("mlp.gate_up_proj",)}
DOWN = {"starcoder2": "mlp.c_proj"}
"""model_type -> names that differ from mlp.gate_proj, mlp.up_proj and mlp.down_proj."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc([12])\.(weight|bias)|linear_fc([12])\.(weight|bias)(\d+))"
)


def _find_rule(name: str, config: Any, kind: str) -> Rule | None:
    """Return the rule for a Megatron tensor of model type `kind`, or None if there is none."""
    if name in OUTER_NAMES:
        return _build_copy_rule(OUTER_NAMES[name])
    match = _LAYER.fullmatch(name)
    if match is None:
        return None
    layer, local = f"model.layers.{match[1]}.", match[2]
    layer_names = {**LAYER_NAMES, **SPECIAL.get(kind, {})}
    if local in layer_names:
        return _build_copy_rule(layer + layer_names[local])
    for find in (_find_attention_rule, _find_mlp_rule, _find_router_rule, _find_expert_rule, _find_grouped_rule):
        if rule := find(layer, local, config, kind):
            return rule
    return None


def _build_copy_rule(name: str) -> Rule:
    return Rule((Piece(name),), lambda parts: parts[0], lambda whole: [whole])


def _build_rule(names: Sequence[str], join: Join, split: Split) -> Rule:
    return Rule(tuple(map(Piece, names)), join, split)


def _find_attention_rule(layer: str, local: str, config: Any, kind: str) -> Rule | None:
    prefix, _, suffix = local.rpartition(".")
    if prefix != "self_attention.linear_qkv" or suffix not in ("weight", "bias"):
        return None
    heads, groups = config.num_attention_heads, config.num_query_groups
    join, split = build_qkv_functions(heads, groups, config.kv_channels)
    if kind != "phi3":
        return _build_rule([f"{layer}self_attn.{part}_proj.{suffix}" for part in "qkv"], join, split)
    rows = [heads * config.kv_channels, groups * config.kv_channels, groups * config.kv_channels]
    return _build_rule(
        [f"{layer}self_attn.qkv_proj.{suffix}"],
        lambda parts: join(parts[0].split(rows)),
        lambda whole: [_cat(split(whole))],
    )


def build_qkv_functions(heads: int, groups: int, channels: int) -> tuple[Join, Split]:
    """Return (join, split) for q [h d, ...], k and v [g d, ...], and Megatron's linear_qkv [g (h / g + 2) d, ...]."""

    def join(parts: Sequence[Tensor]) -> Tensor:
        q, k, v = (part.reshape(groups, -1, channels, *part.shape[1:]) for part in parts)
        return _cat([q, k, v], 1).reshape(-1, *parts[0].shape[1:])

    def split(whole: Tensor) -> Sequence[Tensor]:
        per_group = whole.reshape(groups, heads // groups + 2, channels, *whole.shape[1:])
        return [part.reshape(-1, *whole.shape[1:]) for part in per_group.split([heads // groups, 1, 1], 1)]

    return join, split


def _cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    import torch

    return torch.cat(list(parts), dim)


def _build_gated_rule(names: Sequence[str]) -> Rule:
    """Return the rule for a matrix of the gate projection followed by the up projection."""
    return _build_rule(names, _cat, lambda whole: whole.chunk(2))


def _find_mlp_rule(layer: str, local: str, config: Any, kind: str) -> Rule | None:
    match = re.fullmatch(r"mlp\.(shared_experts\.)?linear_fc([12])\.(weight|bias)", local)
    if match is None:
        return None
    shared, number, suffix = match[1] or "", match[2], match[3]
    if number == "2":
        down_name = DOWN.get(kind, f"mlp.{shared}down_proj")
        return _build_copy_rule(f"{layer}{down_name}.{suffix}")
    names = GATE_AND_UP.get(kind, (f"mlp.{shared}gate_proj", f"mlp.{shared}up_proj"))
    full_names = [f"{layer}{name}.{suffix}" for name in names]
    return _build_gated_rule(full_names) if len(full_names) == 2 else _build_copy_rule(full_names[0])


def _find_router_rule(layer: str, local: str, config: Any, kind: str) -> Rule | None:
    prefix, _, suffix = local.rpartition(".")
    return _build_copy_rule(f"{layer}{ROUTERS.get(kind, 'mlp.gate')}.{suffix}") if prefix == "mlp.router" else None


def _find_expert_rule(layer: str, local: str, config: Any, kind: str) -> Rule | None:
    match = _EXPERT.fullmatch(local)
    if match is None:
        return None
    expert, number, suffix = match[1] or match[6], match[2] or match[4], match[3] or match[5]
    return _build_expert_rule(layer, int(expert), number == "1", suffix, kind)


def _build_expert_rule(layer: str, expert: int, first: bool, suffix: str, kind: str) -> Rule:
    if kind == "gpt_oss":
        return _build_gpt_oss_rule(layer, expert, first, suffix)
    folder, gate, up, down = EXPERTS.get(kind, ("mlp.experts", "gate_proj", "up_proj", "down_proj"))
    prefix = f"{layer}{folder}.{expert}."
    if first:
        return _build_gated_rule([f"{prefix}{gate}.{suffix}", f"{prefix}{up}.{suffix}"])
    return _build_copy_rule(f"{prefix}{down}.{suffix}")


def _build_gpt_oss_rule(layer: str, expert: int, first: bool, suffix: str) -> Rule:
    """Return the rule for an expert of gpt-oss: tensors [E, in, out], in which columns of gate and up alternate."""
    name = f"{layer}mlp.experts.{'gate_up_proj' if first else 'down_proj'}{'_bias' if suffix == 'bias' else ''}"

    def join(parts: Sequence[Tensor]) -> Tensor:
        tensor = parts[0].t() if suffix == "weight" else parts[0]
        return _cat([tensor[0::2], tensor[1::2]]) if first else tensor

    def split(tensor: Tensor) -> Sequence[Tensor]:
        if first:
            gate, up = tensor.chunk(2)
            tensor = _stack([gate, up], 1).reshape(tensor.shape)
        return [tensor.t() if suffix == "weight" else tensor]

    return Rule((Piece(name, expert),), join, split)


def _stack(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    import torch

    return torch.stack(list(parts), dim)


def _find_grouped_rule(layer: str, local: str, config: Any, kind: str) -> Rule | None:
    """Return the rule for a matrix of Megatron's GroupedMLP, which concatenates transposed expert matrices."""
    match = re.fullmatch(r"mlp\.experts\.weight([12])", local)
    if match is None:
        return None
    count = config.num_moe_experts
    experts = [_build_expert_rule(layer, expert, match[1] == "1", "weight", kind) for expert in range(count)]
    width = len(experts[0].pieces)

    def join(parts: Sequence[Tensor]) -> Tensor:
        expert_tensors = [rule.join(parts[at * width : (at + 1) * width]).t() for at, rule in enumerate(experts)]
        stacked_experts = _stack(expert_tensors)  # [E, in, out]
        shape = (stacked_experts.shape[1], -1) if match[1] == "1" else (-1, stacked_experts.shape[2])
        return stacked_experts.reshape(*shape)

    def split(expert_tensors: Tensor) -> Sequence[Tensor]:
        shape = (count, config.hidden_size, -1) if match[1] == "1" else (count, -1, config.hidden_size)
        return [
            part
            for rule, own in zip(experts, expert_tensors.reshape(*shape), strict=True)
            for part in rule.split(own.t())
        ]

    return Rule(tuple(piece for rule in experts for piece in rule.pieces), join, split)
