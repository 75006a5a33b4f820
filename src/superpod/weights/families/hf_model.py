"""A model from its Hugging Face `config.json` alone, as NeMo's nemo_class class: for the models of a user's own folder.

Which class computes it, and with which fields, the import decides (weights/families/nemo_class.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from superpod.errors import UserError
from superpod.planner.formats import hf_shape
from superpod.planner.formats.files import read_json

if TYPE_CHECKING:
    import nemo_run as run

    from superpod.weights.families.nemo_class import NemoClass

MEND_HF = "take CosSinConfig1B of examples/gemma3/modules with its sizes; or convert it, which needs no training"
"""The way round for a Gemma 3 of one's own."""
NOT_THE_MODELS = ("vocab_size", "seq_length")
"""Fields that a recipe leaves alone: the vocabulary is the tokenizer's, the length the recipe's."""


def hf_model(path: str | Path) -> run.Config:
    """NeMo's model for the `config.json` at `path`: a model function of a collection may return it.

    Raises:
        UserError: when no class of NeMo computes what a key says, or a key is not known.
    """
    from superpod.collection.registry import models
    from superpod.weights.families.nemo_class import find_nemo_class

    path = Path(path)
    hf_shape.from_config(path)  # refuses what is no configuration, or lacks a key
    nemo_class = find_nemo_class(read_json(path), str(path))
    if nemo_class.unknown:
        hint = "delete it where it changes nothing; else subclass NeMo's configuration"
        raise UserError(f"{path}: {nemo_class.unknown[0]} is no key of {nemo_class.config}", hint)
    if nemo_class.model == "Gemma3Model":
        raise UserError(f"{path}: its model cannot train: {models()['gemma3_1b'].broken}", MEND_HF)
    return _config(nemo_class)


def _config(nemo_class: NemoClass) -> run.Config:
    """With the fields that differ from the class's own, as a person would write it."""
    import importlib
    from dataclasses import fields

    import nemo_run as run

    from superpod.weights.families import nemo_config

    model = nemo_config.model_class(nemo_class)
    config = getattr(importlib.import_module(model.__module__), nemo_class.config)
    usual = {field.name: field.default for field in fields(config)}
    values = {
        name: value
        for name, value in nemo_config.settings(nemo_class).items()
        if name not in NOT_THE_MODELS and (name not in usual or usual[name] != value)
    }
    return run.Config(model, config=run.Config(config, **values))
