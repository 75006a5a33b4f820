"""What readers of Hugging Face configurations share: keys that all architectures have, experts, windows by layer."""

from __future__ import annotations

from typing import Any

from superpod.errors import UserError

Config = dict[str, Any]


def common(c: Config, *, tied: bool = False) -> Config:
    """The keys that all families share; `tied` is the meaning of an absent tie_word_embeddings."""
    return {
        "layers": c["num_hidden_layers"],
        "hidden": c["hidden_size"],
        "ffn": c.get("intermediate_size") or 0,
        "heads": c["num_attention_heads"],
        "kv_heads": c.get("num_key_value_heads") or 0,
        "head_dim": c.get("head_dim") or 0,
        "vocab": c["vocab_size"],
        "tied": c.get("tie_word_embeddings", tied),
        "qkv_bias": c.get("attention_bias") or False,
        "proj_bias": c.get("attention_bias") or False,
        "mlp_bias": c.get("mlp_bias") or False,
    }


def windowed(c: Config) -> Config:
    """A Llama with a window, where `sliding_window` is one."""
    return common(c) | {"window": c.get("sliding_window") or 0}


def experts(c: Config, count: str) -> Config:
    """A mixture of experts, whose number is called `count`."""
    return {"experts": c[count], "topk": c["num_experts_per_tok"], "expert_ffn": c["moe_intermediate_size"]}


def layer_windows(c: Config, window: int) -> Config:
    """Which layers see a window only, from `layer_types`; `window` is what a sliding layer sees, 0 = none slides."""
    kinds = c.get("layer_types")
    if not window or not isinstance(kinds, list):
        return {"window": window}
    slides = ["sliding" in str(kind) for kind in kinds]
    if not any(slides):
        return {"window": 0}
    period = slides.index(False) + 1 if False in slides else 0
    regular = [bool((layer + 1) % period) if period else True for layer in range(len(slides))]
    share = "" if slides == regular else f"{sum(slides)} of {len(slides)} layers slide, not regularly; "
    every = {"window": window, "global_every": period}
    return every | ({"approximate": f"{share}planned as all but each {period or len(slides)}th"} if share else {})


def with_head(c: Config, head_dim: int, *, tied: bool = False) -> Config:
    """As `common`; an absent head_dim is `head_dim`, not hidden / heads."""
    return common({**c, "head_dim": c.get("head_dim") or head_dim}, tied=tied)


def qwen3(c: Config) -> Config:
    """Qwen 3."""
    return common(c) | {"head_dim": c.get("head_dim", 128), "qk_norm": True}


def qwen3_moe(c: Config) -> Config:
    """Qwen 3 with experts."""
    dense = sorted(c.get("mlp_only_layers") or [])
    if dense != list(range(len(dense))):
        raise UserError(f"mlp_only_layers {dense} are not the first ones", "give the shape by hand: dense_first")
    moe = experts(c, "num_experts") | {"dense_first": len(dense), "moe_every": c.get("decoder_sparse_step", 1)}
    return common(c) | {"qk_norm": True} | moe


def gpt2(c: Config) -> Config:
    """GPT-2, and what kept its keys."""
    return {
        "style": "gpt",
        "layers": c["n_layer"],
        "hidden": c["n_embd"],
        "heads": c["n_head"],
        "ffn": c.get("n_inner") or 4 * c["n_embd"],
        "vocab": c["vocab_size"],
        "positions": c["n_positions"],
    }
