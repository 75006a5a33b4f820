"""A recipe's model and a Hugging Face folder held against each other: shapes must agree, numbers are the folder's."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
"""What the layout was made for, and what the weights must have room in."""

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
"""What a model computes with: a recipe's own would be another model, silently."""


def match_config(partial: run.Partial, folder: Path) -> list[tuple[str, Any, Any]]:
    """Make the recipe's model the one of the folder; returns what was changed as (field, old, new). Needs NeMo.

    Raises:
        UserError: the folder is of another family, or another shape, every difference named.
    """
    import fiddle as fdl
    from nemo.collections import llm
    from transformers import AutoConfig

    name = huggingface.family(folder)
    theirs = getattr(llm, name)
    ours: Any = fdl.get_callable(partial.model)
    if not issubclass(ours, theirs):
        raise UserError(f"{folder} is a {name}, and the recipe trains a {ours.__name__}", "take a recipe of that model")
    importer = theirs.importer(f"hf://{folder.absolute()}")
    importer.trust_remote_code = False
    with huggingface.own_tokenizer_folder():
        wanted = importer.config
    have, config = fdl.build(partial.model.config), AutoConfig.from_pretrained(folder)
    wrong = [
        f"{field} {getattr(have, field, None)!r}, not {getattr(wanted, field)!r}"
        for field in SHAPE
        if hasattr(wanted, field) and getattr(have, field, None) != getattr(wanted, field)
    ]
    if wrong:
        raise UserError(
            f"the recipe's model is not that of {folder}: {'; '.join(wrong)}", "take the recipe of that model and size"
        )
    values = {field: getattr(wanted, field) for field in NUMBERS if hasattr(wanted, field)}
    values |= {"vocab_size": config.vocab_size, "share_embeddings_and_output_weights": config.tie_word_embeddings}
    changed = [(field, getattr(have, field, None), new) for field, new in values.items()]
    changed = [each for each in changed if each[1] != each[2]]
    known = {each.name for each in fields(have)} if is_dataclass(have) else set()
    for field, _, new in changed:
        if field not in known:
            raise UserError(f"{folder} has {field} {new!r}, which the recipe's {type(have).__name__} does not know")
        setattr(partial.model.config, field, new)
    return changed
