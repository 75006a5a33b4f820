"""Keys of a Hugging Face config.json: which change nothing, and how older and newer spellings are read."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


class Refused(ValueError):
    """NeMo's class computes something else; the message names the key."""


HARMLESS = frozenset(
    {
        *("architectures", "model_type", "_name_or_path", "name_or_path", "transformers_version", "torch_dtype"),
        *("dtype", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp", "initializer_range"),
        *("attention_dropout", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "auto_map"),
        *("output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id", "problem_type"),
        *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "cache_implementation"),
        *("unsloth_version", "unsloth_fixed", "model_name", "finetuning_task", "task_specific_params", "use_bfloat16"),
        *("quantization_config", "resid_pdrop", "embd_pdrop", "residual_dropout", "embedding_dropout", "sep_token_id"),
        *("aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers", "initial_context_length", "prefix"),
        *("diversity_penalty", "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty"),
        *("length_penalty", "no_repeat_ngram_size", "num_beam_groups", "num_return_sequences", "output_scores"),
        *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "return_dict_in_generate"),
        *("suppress_tokens", "tf_legacy_loss", "tie_encoder_decoder", "typical_p", "is_decoder", "add_cross_attention"),
        *("is_encoder_decoder", "cross_attention_hidden_size", "output_past", "num_labels", "classifier_dropout"),
        *("scale_attention_softmax_in_fp32", "attention_softmax_in_fp32", "bad_words_ids", "begin_suppress_tokens"),
        *("rope_parameters", "original_max_position_embeddings", "tokenizer_class", "mup", "_sliding_window_pattern"),
        *("max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "num_beams", "repetition_penalty"),
        *("decoder_start_token_id", "torchscript", "pruned_heads", "chunk_size_feed_forward", "vocab_file", "dtypes"),
    }
)
"""Keys that change nothing of what a trained next-token model computes, or are checked elsewhere."""

WITHOUT_CAUSAL_MODEL: Config = {
    "is_encoder_decoder": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "tie_encoder_decoder": False,
    "vision_config": None,
    "audio_config": None,
    "text_config": None,
    "compression_config": None,
    "sparsity_config": None,
}
"""Keys of every configuration with the one value that a plain next-token model has."""


def normal(c: Config) -> Config:
    """The configuration as transformers 4.57 writes it: transformers 5's `rope_parameters` become the older keys.

    Raises:
        Refused: old and new keys contradict each other (transformers 4 reads the old ones, 5 some of the new ones), or
            windowed layers have a rotary scaling of their own. The rest stays for the family to refuse.
    """
    rope = c.get("rope_parameters")
    if not isinstance(rope, dict):
        return c
    parts = {key: value for key, value in rope.items() if isinstance(value, dict)}
    flat = dict(parts.get("full_attention", {}) if parts else rope)
    local = parts.get("sliding_attention", {})
    if (kind := local.get("rope_type", "default")) != "default":
        raise Refused(f"rope_parameters has windowed layers of type {kind!r}; NeMo's classes scale full attention only")
    new = {key: flat.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in flat}
    if "rope_theta" in local:
        new["rope_local_base_freq"] = local["rope_theta"]
    new["rope_scaling"] = None if flat.get("rope_type", "default") == "default" else flat
    for key, value in new.items():
        if c.get(key) is not None and _scaling(c[key]) != _scaling(value):
            raise Refused(f"{key} is {c[key]!r}, and rope_parameters says {value!r}")
    return {**c, **new}


def _scaling(value: Any) -> Any:
    """A rotary scaling under its newer spelling, None where nothing is scaled; other values as they are."""
    if not isinstance(value, dict):
        return value
    kind = value.get("rope_type", value.get("type"))
    others = {key: entry for key, entry in value.items() if key not in ("type", "rope_theta", "partial_rotary_factor")}
    return None if kind in (None, "default") else {**others, "rope_type": kind}
