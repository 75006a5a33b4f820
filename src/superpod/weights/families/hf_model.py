"""Builds NeMo's model for a Hugging Face `config.json`, for models in a user's collection.

`nemo_class.py` determines the NeMo class and its fields, as for an import.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from superpod.errors import UserError
from superpod.planner.formats import hf_shape
from superpod.planner.formats.config_files import read_json

if TYPE_CHECKING:
    import nemo_run as run

    from superpod.weights.families.nemo_class import NemoClass

GEMMA3_WORKAROUND = (
    "use CosSinConfig1B of examples/gemma3/modules with its sizes; or convert it, which needs no training"
)
"""Hint for training a Gemma 3 of other sizes."""
SET_ELSEWHERE = ("vocab_size", "seq_length")
"""Fields that the tokenizer and the recipe determine, not config.json."""


def hf_model(path: str | Path) -> run.Config:
    """Return the `run.Config` for the config.json at `path`. Raises UserError if NeMo has no such model."""
    from superpod.collection.registry import models
    from superpod.weights.families.nemo_class import find_nemo_class

    path = Path(path)
    hf_shape.from_config(path)  # raises an error for a file that is not a configuration or lacks a key
    nemo_class = find_nemo_class(read_json(path), str(path))
    if nemo_class.unknown:
        hint = "delete the key if it has no effect; otherwise write a subclass of NeMo's configuration"
        raise UserError(f"{path}: {nemo_class.unknown[0]} is not a key of {nemo_class.config}", hint)
    if nemo_class.model == "Gemma3Model":
        raise UserError(f"{path}: its model cannot train: {models()['gemma3_1b'].broken}", GEMMA3_WORKAROUND)
    return _build_config(nemo_class)


def _build_config(nemo_class: NemoClass) -> run.Config:
    """Return the `run.Config` of the model, with only the fields that differ from the class's defaults."""
    import importlib
    from dataclasses import fields

    import nemo_run as run

    from superpod.weights.families import nemo_config

    model = nemo_config.get_model_class(nemo_class)
    config = getattr(importlib.import_module(model.__module__), nemo_class.config)
    defaults = {field.name: field.default for field in fields(config)}
    values = {
        name: value
        for name, value in nemo_config.get_settings(nemo_class).items()
        if name not in SET_ELSEWHERE and (name not in defaults or defaults[name] != value)
    }
    return run.Config(model, config=run.Config(config, **values))
