"""The planner's shape of a model configuration: that of the model which it was made from, and what is changed in it.

Every field of NeMo's configurations that `ModelShape` has a word for is read, with Megatron's defaults of what is left
open (transformer_config.py, __post_init__): a changed one changes the parameters that are planned.
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
"""{field of the planner's `ModelShape`: field of NeMo's configurations}; a configuration may lack some of them."""

SWITCHES = {
    "gated": "gated_linear_unit",
    "bias": "add_bias_linear",
    "qkv_bias": "add_qkv_bias",
    "tied": "share_embeddings_and_output_weights",
    "qk_norm": "qk_layernorm",
    "shared_gate": "moe_shared_expert_gate",
}
OPTIONAL = ("shared_ffn", "kv_lora", "q_lora", "qk_nope_dim", "qk_rope_dim", "v_dim", "mtp_layers")
PARTS = {
    **{word: NEMO_FIELDS[word] for word in OPTIONAL},
    "mamba_heads": "mamba_num_heads",
    "mamba_head_dim": "mamba_head_dim",
    "mamba_state": "mamba_state_dim",
    "mamba_groups": "mamba_num_groups",
}
"""{word of `ModelShape`: field of NeMo's configurations}; a field that is None is 0 to the planner."""


def changed(shape: ModelShape, made: run.Config, config: run.Config) -> ModelShape:
    """`shape`, which is that of `made`, with everything that `config` sets otherwise.

    A field is taken over where it and the shape mean the same thing: T5 has several of the planner's layers for one of
    its own, and its layers stay. What is not planned so, the parameters of the built model show.

    Raises:
        UserError: sizes that contradict each other.
    """
    before, now = read(made), read(config)
    changes = {word: value for word, value in now.items() if value != before[word] and _same(shape, word, before[word])}
    if "pattern" in changes and "layers" not in changes:
        changes["layers"] = len(now["pattern"])
    return shape.replace(**changes) if changes else shape


def read(config: run.Config) -> dict[str, Any]:
    """Sizes and switches of a configuration, by the planner's words; None = the configuration does not say."""
    r = Reader(cast("run.Partial", config))
    hidden, heads, ffn = r["hidden_size"], r["num_attention_heads"], r["ffn_hidden_size"]
    experts, rows = _count(r["num_moe_experts"]), r["vocab_size"]
    sizes: dict[str, Any] = {"layers": r["num_layers"], "hidden": hidden, "heads": heads}
    sizes["ffn"] = ffn or (4 * hidden if isinstance(hidden, int) else None)
    sizes["kv_heads"] = r["num_query_groups"] or heads
    whole = isinstance(hidden, int) and isinstance(heads, int) and heads > 0
    sizes["head_dim"] = r["kv_channels"] or (hidden // heads if whole else None)
    sizes["vocab"], sizes["vocab_divisible_by"] = rows, 1 if rows else r["make_vocab_size_divisible_by"]
    sizes["norm"] = {"RMSNorm": "rms", "LayerNorm": "layer"}.get(str(r["normalization"]))
    sizes["positions"] = r["seq_length"] if r["position_embedding_type"] == "learned_absolute" else 0
    sizes["sink"] = r["softmax_type"] == "learnable"
    sizes["experts"], sizes["topk"] = experts, _count(r["moe_router_topk"]) if experts else 0
    sizes["expert_ffn"] = (r["moe_ffn_hidden_size"] or sizes["ffn"]) if experts else 0
    sizes["dense_first"], sizes["moe_every"] = _frequency(r["moe_layer_freq"]) if experts else (0, 1)
    sizes["pattern"] = r["hybrid_override_pattern"] or ""
    sizes |= {word: bool(r[field]) for word, field in SWITCHES.items()}
    return sizes | {word: _count(r[field]) for word, field in PARTS.items()}


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _frequency(value: object) -> tuple[int | None, int | None]:
    """(dense layers before the first experts, one layer of how many has them) of `moe_layer_freq`."""
    if isinstance(value, list):
        dense = value.index(1) if 1 in value else len(value)
        if all(value[dense:]):
            return dense, 1
        every = dense + 1  # the planner's pattern: the last layer of every so many has experts
        regular = all(bool(has) == (number % every == dense) for number, has in enumerate(value))
        return (0, every) if regular else (None, None)
    return (0, value) if isinstance(value, int) else (0, 1)


RESOLVED = {"kv_heads": "groups", "head_dim": "channels"}


def _same(shape: ModelShape, word: str, before: object) -> bool:
    """Whether a field of the unchanged configuration is what the planner's shape has in that word."""
    if before is None:  # the tokenizer's vocabulary, or a pattern of the model's class
        return word == "vocab"
    return before == getattr(shape, RESOLVED.get(word, word))
