"""Loads cluster profiles: TOML files that describe the Slurm installation, containers, network and folders of a site.

`slurm/clusters/*.toml` are profiles of DGX SuperPODs; a site copies one and sets its account, partition and folders.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

from superpod.common import collection, package_files
from superpod.errors import UserError, did_you_mean
from superpod.planner.formats.config_files import find_line, read_text

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

    from superpod.slurm.profiles.profile_schema import Cluster

DEFAULT_PROFILES = package_files.included_folder("slurm") / "clusters"

RENAMED_KEYS = {"chain.links": "attempts", "chain.idle_links": "idle_attempts"}
"""Keys of version 0.1 and their new names."""


def load(name: str) -> Cluster:
    """Load a profile by name (a default profile or one of the user's collections) or by the path of a TOML file.

    Raises:
        UserError: there is no such profile, or it is invalid; the message contains all errors with their lines.
    """
    profiles = _paths_by_name()
    is_path = name.endswith(".toml") or "/" in name
    path = Path(name) if is_path else profiles.get(name, Path())
    if not path.is_file():
        known_names = sorted(profiles)
        hint = did_you_mean(name, known_names) or f"profiles: {', '.join(known_names)}, or the path of a TOML file"
        raise UserError(f"there is no cluster profile {name!r}", hint)
    return parse(read_text(path), str(path))


def names() -> list[str]:
    """Return the sorted names of the default profiles and those of the user's collections."""
    return sorted(_paths_by_name())


def _paths_by_name() -> dict[str, Path]:
    return collection.files_by_name("clusters", {path.stem: path for path in DEFAULT_PROFILES.glob("*.toml")})


def parse(text: str, where: str) -> Cluster:
    """Parse a profile from TOML; `where` is the file name for messages.

    Raises:
        UserError: the text is not TOML or not a valid profile; the message contains all errors with their lines.
    """
    import tomllib

    from pydantic import ValidationError

    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not valid TOML: {error}") from error
    try:
        return schema().model_validate({"name": Path(where).stem, **values})
    except ValidationError as error:
        raise UserError("\n".join(_error_lines(error, text, where)), "docs/slurm.md documents every key") from None


def _error_lines(validation_error: ValidationError, text: str, where: str) -> list[str]:
    """Return a line FILE:LINE: KEY RULE for each error in a profile."""
    lines = []
    for error in validation_error.errors():
        keys = [str(key) for key in error["loc"] if not isinstance(key, int)]
        lines.append(f"{where}:{find_line(text, keys)}: {'.'.join(keys)} {_describe(error, keys)}")
    return lines


def _describe(error: ErrorDetails, keys: list[str]) -> str:
    """Return the rule that a key violates, and the rejected value, as the end of a message."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        new_name = RENAMED_KEYS.get(".".join(keys))
        if new_name:
            return f"was renamed {new_name}"
        known_keys = _known_keys(keys[:-1])
        return f"is not a key; {did_you_mean(keys[-1], known_keys) or 'keys: ' + ', '.join(known_keys)}"
    if kind == "missing":
        return "is missing"

    if kind == "literal_error":
        rule = f"must be one of {context['expected']}"
    elif kind == "value_error":
        rule = str(context["error"])
    elif kind in RULES:
        rule = RULES[kind].format(**context)
    else:
        message = str(error["msg"])
        rule = message[0].lower() + message[1:]
    return rule + _format_rejected(error["input"], keys)


RULES = {
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
}
"""Message per pydantic error type."""


def _format_rejected(value: object, keys: list[str]) -> str:
    """Return ", not VALUE"; "" for tables, and for [env] and [notify], whose values may be secrets."""
    from superpod.common.redaction import redact_text

    if keys[:1] in (["env"], ["notify"]) or isinstance(value, dict):
        return ""
    return f", not {redact_text(repr(value))}"


def _known_keys(path: list[str]) -> list[str]:
    """Return the valid keys of a table; `path` is ["slurm"], for example, or [] for the top level."""
    model: type[BaseModel] = schema()
    for key in path:
        model = cast("type[BaseModel]", model.model_fields[key].annotation)
    return list(model.model_fields)


@lru_cache
def schema() -> type[Cluster]:
    """Return the pydantic model of a profile; imports pydantic on first use."""
    from superpod.slurm.profiles import profile_schema

    return profile_schema.Cluster
