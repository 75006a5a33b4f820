"""Match a recipe's model configuration to a Hugging Face folder: shapes must agree, other numbers are taken over."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.errors import UserError
from superpod.recipes.weights import huggingface

if TYPE_CHECKING:
    import nemo_run as run

SHAPE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "num_moe_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "add_qkv_bias",
    "qk_layernorm",
)
"""Fields that decide the shapes of the weights and what the layout was planned for: a difference is refused."""

NUMBERS = (
    "rotary_base",
    "rotary_percent",
    "layernorm_epsilon",
    "scale_factor",
    "low_freq_factor",
    "high_freq_factor",
    "old_context_len",
    "window_size",
    "moe_router_pre_softmax",
)
"""Fields that the model computes with: with the recipe's own values the weights would give other results, silently."""


def match_config(partial: run.Partial, folder: Path) -> list[tuple[str, object, object]]:
    """Give the recipe's model the folder's `NUMBERS`; returns the changes as (field, old, new). Needs NeMo.

    Raises:
        UserError: the folder holds another family or another shape; the message names every difference.
    """
    import fiddle as fdl
    from nemo.collections import llm
    from transformers import AutoConfig

    name = huggingface.family(folder)
    theirs = getattr(llm, name)  # a recipe may train a subclass, such as LlamaEmbeddingModel
    ours = fdl.get_callable(partial.model)
    if not (isinstance(ours, type) and issubclass(ours, theirs)):
        raise UserError(f"{folder} is a {name}, and the recipe trains a {ours.__name__}", "take a recipe of that model")
    importer = theirs.importer(f"hf://{folder.absolute()}")
    importer.trust_remote_code = False  # never run code that a model folder brings along
    with huggingface.own_tokenizer_folder():
        source = importer.config
    target, config = fdl.build(partial.model.config), AutoConfig.from_pretrained(folder)
    # A model class need not have every field of the list: a dense one has no experts.
    mismatches = [
        f"{field} {getattr(target, field, None)!r}, not {getattr(source, field)!r}"
        for field in SHAPE
        if hasattr(source, field) and getattr(target, field, None) != getattr(source, field)
    ]
    if mismatches:
        raise UserError(
            f"the recipe's model is not that of {folder}: {'; '.join(mismatches)}",
            "take the recipe of that model and size",
        )
    values = {field: getattr(source, field) for field in NUMBERS if hasattr(source, field)}
    values |= {"vocab_size": config.vocab_size, "share_embeddings_and_output_weights": config.tie_word_embeddings}
    changes: list[tuple[str, object, object]] = []
    for field, new in values.items():
        if (old := getattr(target, field, None)) != new:
            changes.append((field, old, new))
    names = {item.name for item in fields(target)} if is_dataclass(target) else set()
    for field, _, new in changes:
        if field not in names:
            raise UserError(f"{folder} has {field} {new!r}, which the recipe's {type(target).__name__} does not know")
        setattr(partial.model.config, field, new)
    return changes
