"""Tiny Hugging Face folders with random weights, made on the spot: no hub, no network."""

from pathlib import Path
from typing import Any

TEXTS = ["the quick brown fox jumps over the lazy dog", "sphinx of black quartz, judge my vow", "two and two are four"]
ROWS = 320
"""Rows of the embedding: more than the tokenizer has ids, as in most published models."""

SIZES = {
    "vocab_size": ROWS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
}


def folder(out: Path, kind: str, **sizes: Any) -> Path:
    """A Hugging Face folder of that model_type: bf16 weights from a fixed seed, and a byte-level tokenizer."""
    import torch
    import transformers

    from superpod.recipes.data import tokenizer

    tokenizer.train(TEXTS * 4, 300, out)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind], **ids, **sizes})
    torch.manual_seed(1234)
    model = transformers.AutoModelForCausalLM.from_config(config, torch_dtype=torch.bfloat16)
    model.save_pretrained(out)
    return out
