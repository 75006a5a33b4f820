"""A cluster as a TOML file: what its Slurm, containers, network and folders are called.

`slurm/clusters/*.toml` ships DGX SuperPOD profiles; a site copies one and fills in its account, partition and folders.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

from superpod.common import collection, package_files
from superpod.errors import UserError, did_you_mean
from superpod.planner.formats.files import line_of, text_of

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

    from superpod.slurm.profiles.profile_schema import Cluster

DEFAULT_PROFILES = package_files.included("slurm") / "clusters"

RENAMED = {"chain.links": "attempts", "chain.idle_links": "idle_attempts"}
"""Keys of version 0.1, and what they are called now."""


def load(name: str) -> Cluster:
    """The profile called `name`: a shipped one, one of the user's collections, or the path of a TOML file.

    Raises:
        UserError: no such profile, or what is wrong in it, each with its line and what is allowed there.
    """
    profiles = _by_name()
    path = Path(name) if name.endswith(".toml") or "/" in name else profiles.get(name, Path())
    if not path.is_file():
        known = sorted(profiles)
        hint = did_you_mean(name, known) or f"known: {', '.join(known)}, or the path of a TOML file"
        raise UserError(f"no cluster profile is called {name!r}", hint)
    return parse(text_of(path), str(path))


def names() -> list[str]:
    """The shipped profiles, and those of the user's collections."""
    return sorted(_by_name())


def _by_name() -> dict[str, Path]:
    return collection.by_name("clusters", {path.stem: path for path in DEFAULT_PROFILES.glob("*.toml")})


def parse(text: str, where: str) -> Cluster:
    """A profile from TOML; `where` opens each line of the message when it is wrong.

    Raises:
        UserError: with every mistake, its line, and what is allowed.
    """
    import tomllib

    from pydantic import ValidationError

    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as broken:
        raise UserError(f"{where} is not TOML: {broken}") from broken
    try:
        return schema().model_validate({"name": Path(where).stem, **values})
    except ValidationError as wrong:
        raise UserError("\n".join(_mistakes(wrong, text, where)), "see docs/slurm.md for every key") from None


def _mistakes(wrong: ValidationError, text: str, where: str) -> list[str]:
    mistakes = []
    for error in wrong.errors():
        keys = [str(key) for key in error["loc"] if not isinstance(key, int)]
        mistakes.append(f"{where}:{line_of(text, keys)}: {'.'.join(keys)} {_describe(error, keys)}")
    return mistakes


def _describe(error: ErrorDetails, keys: list[str]) -> str:
    """What a mistake is, and what is allowed in its place."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        known = _known_keys(keys[:-1])
        if new_name := RENAMED.get(".".join(keys)):
            return f"is called {new_name} now"
        return f"is no key; {did_you_mean(keys[-1], known) or 'known: ' + ', '.join(known)}"
    if kind == "missing":
        return "is missing"
    but = _refused_value(error["input"], keys)
    if kind == "literal_error":
        return f"is one of {context['expected']}{but}"
    if kind == "value_error":
        return f"{context['error']}{but}"
    words = {"string_type": "takes a string", "int_type": "takes a whole number", "bool_type": "is true or false"}
    words |= {"list_type": "takes a list", "dict_type": "takes a table", "model_type": "is a table"}
    limits = {"greater_than_equal": "is at least {ge}", "less_than_equal": "is at most {le}"}
    plain = str(error["msg"])
    rule = words.get(kind) or (limits.get(kind) or plain[0].lower() + plain[1:]).format(**context)
    return f"{rule}{but}"


def _refused_value(value: object, keys: list[str]) -> str:
    """The refused value, for the end of a message. Never a secret: nothing of [env] and [notify], which may."""
    from superpod.common.redaction import redact_text

    # A whole table is too long to read, and what it holds may be anybody's.
    return "" if keys[:1] in (["env"], ["notify"]) or isinstance(value, dict) else f", not {redact_text(repr(value))}"


def _known_keys(path: list[str]) -> list[str]:
    model: type[BaseModel] = schema()
    for key in path:
        model = cast("type[BaseModel]", model.model_fields[key].annotation)
    return list(model.model_fields)


@lru_cache
def schema() -> type[Cluster]:
    """The profile as a pydantic model; its fields are the documentation of every key."""
    from superpod.slurm.profiles import profile_schema

    return profile_schema.Cluster
