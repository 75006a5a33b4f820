"""Derive the planner's shape of a model configuration from the shape of the model on which it is based.

All fields of NeMo's configurations with a counterpart in `ModelShape` are read. Unset fields have Megatron's defaults
(transformer_config.py, __post_init__).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from superpod.nemo2.validation.reading import Reader
from superpod.planner.models import ModelShape

if TYPE_CHECKING:
    import nemo_run as run

NEMO_FIELDS = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "ffn": "ffn_hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_query_groups",
    "channels": "kv_channels",
    "vocab": "vocab_size",
    "experts": "num_moe_experts",
    "topk": "moe_router_topk",
    "expert_ffn": "moe_ffn_hidden_size",
    "shared_ffn": "moe_shared_expert_intermediate_size",
    "kv_lora": "kv_lora_rank",
    "q_lora": "q_lora_rank",
    "qk_nope_dim": "qk_head_dim",
    "qk_rope_dim": "qk_pos_emb_head_dim",
    "v_dim": "v_head_dim",
    "mtp_layers": "mtp_num_layers",
}
"""Field of `ModelShape` -> field of NeMo's configurations; a configuration class may lack some of them."""

SWITCHES = {
    "gated": "gated_linear_unit",
    "bias": "add_bias_linear",
    "qkv_bias": "add_qkv_bias",
    "tied": "share_embeddings_and_output_weights",
    "qk_norm": "qk_layernorm",
    "shared_gate": "moe_shared_expert_gate",
}
"""Boolean field of `ModelShape` -> field of NeMo's configurations."""
OPTIONAL = ("shared_ffn", "kv_lora", "q_lora", "qk_nope_dim", "qk_rope_dim", "v_dim", "mtp_layers")
PARTS = {
    **{name: NEMO_FIELDS[name] for name in OPTIONAL},
    "mamba_heads": "mamba_num_heads",
    "mamba_head_dim": "mamba_head_dim",
    "mamba_state": "mamba_state_dim",
    "mamba_groups": "mamba_num_groups",
}
"""Field of `ModelShape` -> field of NeMo's configurations, whose value None stands for 0."""


def apply_changes(shape: ModelShape, original: run.Config, config: run.Config) -> ModelShape:
    """Return the shape of `config`: `shape`, which belongs to `original`, with the fields in which they differ.

    A changed field is copied only if it has the same meaning in both: the planner counts one layer of T5 as several, so
    the number of layers of T5 is not copied. The parameter count of the built model reveals such changes.

    Raises:
        UserError: sizes conflict with each other.
    """
    before, after = read(original), read(config)
    changes = {
        name: value
        for name, value in after.items()
        if value != before[name] and _has_same_meaning(shape, name, before[name])
    }
    if "pattern" in changes and "layers" not in changes:
        changes["layers"] = len(after["pattern"])
    return shape.replace(**changes) if changes else shape


def read(config: run.Config) -> dict[str, Any]:
    """Return {field of `ModelShape`: value} for a model configuration; the value of an unset size is None."""
    reader = Reader(cast("run.Partial", config))
    hidden, heads, ffn = reader["hidden_size"], reader["num_attention_heads"], reader["ffn_hidden_size"]
    experts, vocab = _int_or_zero(reader["num_moe_experts"]), reader["vocab_size"]
    sizes: dict[str, Any] = {"layers": reader["num_layers"], "hidden": hidden, "heads": heads}
    sizes["ffn"] = ffn or (4 * hidden if isinstance(hidden, int) else None)
    sizes["kv_heads"] = reader["num_query_groups"] or heads
    has_sizes = isinstance(hidden, int) and isinstance(heads, int) and heads > 0
    sizes["head_dim"] = reader["kv_channels"] or (hidden // heads if has_sizes else None)
    sizes["vocab"], sizes["vocab_divisible_by"] = vocab, 1 if vocab else reader["make_vocab_size_divisible_by"]
    sizes["norm"] = {"RMSNorm": "rms", "LayerNorm": "layer"}.get(str(reader["normalization"]))
    sizes["positions"] = reader["seq_length"] if reader["position_embedding_type"] == "learned_absolute" else 0
    sizes["sink"] = reader["softmax_type"] == "learnable"
    sizes["experts"], sizes["topk"] = experts, _int_or_zero(reader["moe_router_topk"]) if experts else 0
    sizes["expert_ffn"] = (reader["moe_ffn_hidden_size"] or sizes["ffn"]) if experts else 0
    sizes["dense_first"], sizes["moe_every"] = _read_moe_frequency(reader["moe_layer_freq"]) if experts else (0, 1)
    sizes["pattern"] = reader["hybrid_override_pattern"] or ""
    sizes |= {name: bool(reader[field]) for name, field in SWITCHES.items()}
    return sizes | {name: _int_or_zero(reader[field]) for name, field in PARTS.items()}


def _int_or_zero(value: object) -> int:
    """Return the value if it is an integer, otherwise 0."""
    return value if isinstance(value, int) else 0


def _read_moe_frequency(value: object) -> tuple[int | None, int | None]:
    """Return (number of leading dense layers, interval of layers with experts) for `moe_layer_freq`.

    Return (None, None) for a pattern that the planner cannot represent.
    """
    if isinstance(value, int):
        return 0, value
    if not isinstance(value, list):
        return 0, 1
    dense = value.index(1) if 1 in value else len(value)
    if all(value[dense:]):
        return dense, 1
    interval = dense + 1  # in the planner's pattern, the last layer of each interval has experts
    is_regular = all(bool(is_moe) == (number % interval == dense) for number, is_moe in enumerate(value))
    return (0, interval) if is_regular else (None, None)


RESOLVED = {"kv_heads": "groups", "head_dim": "channels"}
"""Field of `ModelShape` -> property of `ModelShape` with its value, or else its default."""


def _has_same_meaning(shape: ModelShape, name: str, before: object) -> bool:
    """Return whether a field of the shape equals its value `before` in the original configuration."""
    if before is None:  # the vocabulary of the tokenizer, or a pattern that the model's class sets
        return name == "vocab"
    return before == getattr(shape, RESOLVED.get(name, name))
