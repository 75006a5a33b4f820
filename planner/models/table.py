"""Models by name: the TOML files of `planner/data/models/`, and the user's own."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from superpod.errors import UserError, did_you_mean
from superpod.planner.files import read_toml
from superpod.planner.models.shape import ModelShape

FOLDER = Path(__file__).parent.parent / "data" / "models"


NOT_MODELS = ("aliases", "unsupported")
"""Tables of the built-in files that are no model: other names of one, and why a published one is not modelled."""


def find(name: str) -> ModelShape:
    """The model of that name.

    Raises:
        UserError: naming the closest ones when there is none, or why a known one is not modelled.
    """
    name = str(name).strip().lower().replace("-", "_")
    name = _other("aliases").get(name, name)
    if name in unsupported():
        raise UserError(f"{name} is known, but not modelled: {unsupported()[name]}", "give its shape by hand")
    if name not in _tables():
        hint = did_you_mean(name, names()) or "or the path of a Hugging Face config.json, or a shape by hand"
        raise UserError(f"no model is called {name!r}", hint)
    return _model(name)


def names() -> list[str]:
    """Every model of the table, in the files' order."""
    return list(_tables())


def unsupported() -> dict[str, str]:
    """Published models that the blocks here do not describe, and why."""
    return _other("unsupported")


def load(path: str | Path) -> dict[str, ModelShape]:
    """The models of a user's TOML file: a table each, keys = fields of `ModelShape`, `style = "gpt"` or `"llama"`.

    Raises:
        UserError: when the file cannot be read, or naming the key and what it may hold.
    """
    path = Path(path)
    tables = read_toml(path)
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise UserError(f"{path}: {name} stands outside a table", "a model is a table: [my_model]")
    own = {"source": str(path)}
    return {name: ModelShape.from_mapping(name, own | table, f"{path} [{name}]") for name, table in tables.items()}


@cache
def _model(name: str) -> ModelShape:
    table, where = _tables()[name]
    return ModelShape.from_mapping(name, table, where)


@cache
def _tables() -> dict[str, tuple[dict[str, Any], str]]:
    models = [(name, t, file) for file, tables in _files() for name, t in tables.items() if name not in NOT_MODELS]
    return {name: (table, f"{file} [{name}]") for name, table, file in models}


@cache
def _other(section: str) -> dict[str, str]:
    return {name: text for _, tables in _files() for name, text in tables.get(section, {}).items()}


@cache
def _files() -> list[tuple[str, dict[str, Any]]]:
    return [(path.name, read_toml(path)) for path in sorted(FOLDER.glob("*.toml"))]
