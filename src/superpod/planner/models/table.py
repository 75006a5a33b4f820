"""Models by name: the TOML files of `planner/data/models/`, and those of the user's collections."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from superpod.common import collection
from superpod.errors import UserError, did_you_mean
from superpod.planner.formats.files import find_line, parse_toml, read_text, read_toml
from superpod.planner.models.shape import ModelShape

FOLDER = Path(__file__).parent.parent / "data" / "models"


MOST_NAMED = 5
"""Names that are suggested at most where one is given in part."""

NOT_MODELS = ("aliases", "unsupported")
"""Tables of the built-in files that are no model: other names of one, and why a published one is not modelled."""


def find(name: str) -> ModelShape:
    """The model of that name.

    Raises:
        UserError: naming the closest ones when there is none, or why a known one is not modelled.
    """
    given, name = str(name), str(name).strip().lower().replace("-", "_")
    name = _other("aliases").get(name, name)
    if name in unsupported():
        raise UserError(f"{name} is not supported: {unsupported()[name]}", "specify its shape instead of its name")
    if name not in _tables():
        _refuse_file(given)
        known = [*names(), *aliases()]
        holding = [one for one in known if len(name) > 1 and name in one][:MOST_NAMED]
        near = f"did you mean {' or '.join(holding)}?" if holding else did_you_mean(name, known)
        hint = near or "pass the path of a Hugging Face config.json, or a shape: layers=32,hidden=4096,..."
        raise UserError(f"there is no model {name!r}", hint)
    return _model(name)


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
    """Every model of the table, in the files' order."""
    return list(_tables())


def aliases() -> dict[str, str]:
    """Other names of models of the table -> theirs."""
    return _other("aliases")


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
            raise UserError(f"{path}: {name} is outside a table", "write each model as a table: [my_model]")
    own = {"source": str(path)}
    return {name: ModelShape.from_mapping(name, own | table, f"{path} [{name}]") for name, table in tables.items()}


@cache
def _model(name: str) -> ModelShape:
    table, where = _tables()[name]
    return ModelShape.from_mapping(name, table, where)


@cache
def _tables() -> dict[str, tuple[dict[str, Any], str]]:
    """Name -> fields of the model and where they are written: ours, then those of the user's collections."""
    models = {
        name: (table, f"{file} [{name}]")
        for file, tables in _files()
        for name, table in tables.items()
        if name not in NOT_MODELS
    }
    for path in collection.files("shapes"):
        for name, table, where in _own(path):
            if name in models or name in _other("aliases") or name in NOT_MODELS:
                raise UserError(f"{where}: a model named {name} already exists", "choose another name")
            models[name] = table, where
    return models


def _own(path: Path) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Name, fields and place of each model in a collection's file: a TOML table each, or one as a config.json."""
    if path.suffix == ".json":
        from superpod.planner.formats import hf_shape

        shape = hf_shape.from_config(path)
        table = {f.name: getattr(shape, f.name) for f in fields(shape) if f.name != "name"}
        yield _plain(path.stem, str(path)), table, str(path)
    elif path.suffix == ".toml":
        text = read_text(path)
        for name, table in parse_toml(text, str(path)).items():
            where = f"{path}:{find_line(text, [name])}"
            if not isinstance(table, dict):
                raise UserError(f"{where}: {name} is outside a table", "write each model as a table: [my_model]")
            yield _plain(name, where), {"source": str(path)} | table, f"{where} [{name}]"
    else:
        raise UserError(
            f"{path} must be a .toml or .json file", "write shapes as NAME.toml, or a Hugging Face config as NAME.json"
        )


def _plain(name: str, where: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"{where}: {name!r} is not a valid model name", "use lowercase letters, digits and _")
    return name


@cache
def _other(section: str) -> dict[str, str]:
    return {name: text for _, tables in _files() for name, text in tables.get(section, {}).items()}


@cache
def _files() -> list[tuple[str, dict[str, Any]]]:
    return [(path.name, read_toml(path)) for path in sorted(FOLDER.glob("*.toml"))]
