"""A model as a user names it: by name, by its config.json, or by its shape. The command line and tables take these."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from superpod.errors import UserError
from superpod.planner import models
from superpod.planner.formats import option_syntax
from superpod.planner.models import ModelShape


def find(text: str) -> ModelShape:
    """A model by name, by the path of a config.json, or by its shape: `layers=32,hidden=4096,heads=32,vocab=32000`.

    Raises:
        UserError: there is no such model, the file cannot be read, or the shape contradicts itself.
    """
    from superpod.planner.formats import hf_shape

    if not text.strip():
        raise UserError("the name is empty", "a recipe, a model or a config.json; `recipes list` has the models")
    if len(text) > 4000:
        raise UserError("a model is a name, a path or a short shape; this has more than 4,000 letters")
    if text.lstrip().startswith("{"):
        raise UserError("a configuration is given as a file, not as its text", "write it to config.json, and name that")
    if "=" in text and not _is(Path.exists, text):
        shape: dict[str, Any] = {**option_syntax.parse_pairs(text, "the shape")}
        return models.ModelShape.from_shape(**shape)
    is_folder = _is(Path.is_dir, text)
    if is_folder and not Path(text, "config.json").exists():
        raise UserError(f"the folder {text} holds no config.json", "name a Hugging Face model's folder, or the file")
    if text.endswith(".json") or is_folder:
        return hf_shape.from_config(text)
    return models.find(text)


def _is(test: Callable[[Path], bool], text: str) -> bool:
    """Whether a path passes the test; text that can be no path does not."""
    try:
        return test(Path(text))
    except (OSError, ValueError):  # longer than any name, or with a NUL
        return False
