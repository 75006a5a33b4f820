"""Copies the values of a Hugging Face config.json to a recipe's model, which must have the same shape."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError
from superpod.weights.families import nemo_config
from superpod.weights.transfer import conversion

if TYPE_CHECKING:
    import nemo_run as run


def match_config(partial: run.Partial, folder: Path) -> list[tuple[str, object, object]]:
    """Copy the values of config.json to a recipe, and return (field, old, new). Raises UserError for other shapes."""
    import fiddle as fdl

    nemo_class = conversion.check_folder(folder)
    nemo_model = nemo_config.get_model_class(nemo_class)  # a recipe may train a subclass, such as LlamaEmbeddingModel
    recipe_model = fdl.get_callable(partial.model)
    if not (isinstance(recipe_model, type) and issubclass(recipe_model, nemo_model)):
        raise UserError(
            f"{folder} contains a {nemo_model.__name__}, but the recipe trains a {recipe_model.__name__}",
            "use a recipe of that model",
        )
    target: Any = fdl.build(partial.model.config)
    source = nemo_config.build_config(nemo_class, target.params_dtype)
    mismatches = nemo_config.find_differences(source, target, nemo_config.SHAPE_FIELDS)
    if mismatches:
        mismatch_list = "; ".join(f"{name} is {old!r} instead of {new!r}" for name, new, old in mismatches)
        raise UserError(
            f"the recipe's model differs from {folder}: {mismatch_list}",
            "use the recipe of that model and size (`recipes list`), or create your own: docs/extending.md",
        )
    _require_within_window(partial, nemo_class.model, source)
    changes: list[tuple[str, object, object]] = []
    numbers: list[tuple[str, Any, Any]] = nemo_config.find_differences(source, target, nemo_config.VALUE_FIELDS)
    names = {item.name for item in fields(target)} if is_dataclass(target) else set()
    for name, new, old in numbers:
        if name not in names:
            raise UserError(f"{folder} has {name} {new!r}, which the recipe's {type(target).__name__} does not support")
        setattr(partial.model.config, name, new)
        changes.append((name, old, new))
        if name == "activation_func":
            partial.model.config.bias_activation_fusion = source.bias_activation_fusion
    return changes


def _require_within_window(partial: run.Partial, model: str, source: object) -> None:
    """Raise UserError if Gemma 2's sequences exceed its window, which NeMo's class applies to the wrong layers."""
    window = getattr(source, "window_size", None)
    length = getattr(partial.data, "seq_length", 0) or 0
    if model == "Gemma2Model" and window and length > window[0] + 1:
        raise UserError(
            f"sequences of {length} tokens exceed the model's sliding window of {window[0] + 1}, which NeMo 2.7.3's "
            "Gemma 2 applies to the wrong layers, so that a different function would be trained",
            f"set data.seq_length={window[0] + 1}",
        )
