"""Find the model that a command line or a table specifies: by name, config.json or shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from superpod.errors import UserError
from superpod.planner import models
from superpod.planner.formats import option_syntax
from superpod.planner.models import ModelShape


def find(text: str) -> ModelShape:
    """Return the model for a name, a path to a config.json, or a shape: `layers=32,hidden=4096,heads=32,vocab=32000`.

    Raises:
        UserError: there is no such model, the file cannot be read, or the shape is inconsistent.
    """
    from superpod.planner.formats import hf_shape

    if not text.strip():
        raise UserError(
            "the model name is empty", "pass a recipe, a model or a config.json; `recipes list` lists the models"
        )
    if len(text) > 4000:
        raise UserError("a model must be a name, a path or a shape of at most 4,000 characters")
    if text.lstrip().startswith("{"):
        raise UserError("the model is JSON text, not a file", "write it to config.json, and pass the path")
    if "=" in text and not _test_path(Path.exists, text):
        shape: dict[str, Any] = {**option_syntax.parse_pairs(text, "the shape")}
        return models.ModelShape.from_shape(**shape)
    is_folder = _test_path(Path.is_dir, text)
    if is_folder and not Path(text, "config.json").exists():
        raise UserError(f"the folder {text} has no config.json", "pass the folder of a Hugging Face model, or the file")
    if text.endswith(".json") or is_folder:
        return hf_shape.from_config(text)
    return models.find(text)


def _test_path(test: Callable[[Path], bool], text: str) -> bool:
    """Return whether `test` (such as `Path.exists`) is true for a text; False if it cannot be a path."""
    try:
        return test(Path(text))
    except (OSError, ValueError):  # too long for a file name, or contains NUL
        return False
