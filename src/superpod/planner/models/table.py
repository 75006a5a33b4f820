"""Models by name, from the TOML files in `planner/data/models/` and in user collections."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from superpod.common import collection
from superpod.errors import UserError, did_you_mean
from superpod.planner.formats.config_files import find_line, parse_toml, read_text, read_toml
from superpod.planner.models.shape import ModelShape

FOLDER = Path(__file__).parent.parent / "data" / "models"


MAX_SUGGESTIONS = 5
"""Maximum number of suggested names that contain the given name."""

NOT_MODELS = ("aliases", "unsupported")
"""Tables in the built-in files that are not models: aliases, and reasons why published models are not supported."""


def find(name: str) -> ModelShape:
    """Return the shape of a model by its name or alias.

    Raises:
        UserError: there is no such model (the hint has similar names), or it is not supported.
    """
    given, name = str(name), str(name).strip().lower().replace("-", "_")
    name = _read_special_table("aliases").get(name, name)
    if name in unsupported_models():
        raise UserError(
            f"{name} is not supported: {unsupported_models()[name]}", "specify its shape instead of its name"
        )
    if name not in _tables():
        _refuse_file(given)
        known_names = [*names(), *aliases()]
        similar = [known for known in known_names if len(name) > 1 and name in known][:MAX_SUGGESTIONS]
        suggestion = f"did you mean {' or '.join(similar)}?" if similar else did_you_mean(name, known_names)
        hint = suggestion or "pass the path of a Hugging Face config.json, or a shape: layers=32,hidden=4096,..."
        raise UserError(f"there is no model {name!r}", hint)
    return _create_model(name)


def _refuse_file(name: str) -> None:
    """Raise UserError if the name is an existing file or folder that is not a config.json."""
    path = Path(name[:1000])
    try:
        exists, is_folder = path.exists(), path.is_dir()
    except (OSError, ValueError):
        return
    if is_folder:
        raise UserError(f"{name} is a folder without a config.json", "pass the folder of a Hugging Face model")
    if exists:
        raise UserError(f"{name} is not a .json file", "pass the model's config.json, or its folder")


def names() -> list[str]:
    """List the names of all models, in the order of the files."""
    return list(_tables())


def aliases() -> dict[str, str]:
    """Return alias -> name of its model."""
    return _read_special_table("aliases")


def unsupported_models() -> dict[str, str]:
    """Return name -> reason for each published model that is not supported."""
    return _read_special_table("unsupported")


def load(path: str | Path) -> dict[str, ModelShape]:
    """Return name -> shape of the models in a TOML file: one table each, with fields of `ModelShape` and `style`.

    Raises:
        UserError: the file cannot be read, or a key or value is invalid.
    """
    path = Path(path)
    tables = read_toml(path)
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise UserError(f"{path}: {name} is outside a table", "begin each model with a header such as [my_model]")
    source = {"source": str(path)}
    return {name: ModelShape.from_mapping(name, source | table, f"{path} [{name}]") for name, table in tables.items()}


@cache
def _create_model(name: str) -> ModelShape:
    """Create the shape of a model in `_tables`."""
    table, where = _tables()[name]
    return ModelShape.from_mapping(name, table, where)


@cache
def _tables() -> dict[str, tuple[dict[str, Any], str]]:
    """Return name -> (fields, location for messages) of built-in models, then of those in user collections."""
    models = {
        name: (table, f"{file} [{name}]")
        for file, tables in _read_files()
        for name, table in tables.items()
        if name not in NOT_MODELS
    }
    for path in collection.files("shapes"):
        for name, table, where in _read_user_models(path):
            if name in models or name in _read_special_table("aliases") or name in NOT_MODELS:
                raise UserError(f"{where}: a model named {name} already exists", "choose a different name")
            models[name] = table, where
    return models


def _read_user_models(path: Path) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield name, fields and location of each model in a user's file: a TOML file, or a config.json with one model."""
    if path.suffix == ".json":
        from superpod.planner.formats import hf_shape

        shape = hf_shape.from_config(path)
        table = {f.name: getattr(shape, f.name) for f in fields(shape) if f.name != "name"}
        yield _validate_name(path.stem, str(path)), table, str(path)
    elif path.suffix == ".toml":
        text = read_text(path)
        for name, table in parse_toml(text, str(path)).items():
            where = f"{path}:{find_line(text, [name])}"
            if not isinstance(table, dict):
                raise UserError(
                    f"{where}: {name} is outside a table", "begin each model with a header such as [my_model]"
                )
            yield _validate_name(name, where), {"source": str(path)} | table, f"{where} [{name}]"
    else:
        raise UserError(
            f"{path} must be a .toml or .json file", "save shapes as NAME.toml, or a Hugging Face config as NAME.json"
        )


def _validate_name(name: str, where: str) -> str:
    """Return the name of a user's model. Raises UserError if it has invalid characters."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"{where}: {name!r} is not a valid model name", "use lowercase letters, digits and _")
    return name


@cache
def _read_special_table(section: str) -> dict[str, str]:
    """Return the entries of a table in NOT_MODELS, over all built-in files."""
    return {name: text for _, tables in _read_files() for name, text in tables.get(section, {}).items()}


@cache
def _read_files() -> list[tuple[str, dict[str, Any]]]:
    """Return (file name, tables) of each built-in file."""
    return [(path.name, read_toml(path)) for path in sorted(FOLDER.glob("*.toml"))]
