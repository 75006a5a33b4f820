"""`trainer.max_steps=10` on a command line: NeMo-Run's own syntax, with a misspelling caught."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any, cast, get_args, get_type_hints

import fiddle as fdl
import nemo_run as run
from fiddle._src import history
from nemo_run.cli.cli_parser import CLIException, parse_cli_args, type_parser

from superpod.errors import UserError, did_you_mean
from superpod.recipes import options, shorthands
from superpod.recipes.rules.reading import Reader
from superpod.recipes.signatures import parameter_of, parameters

LENGTHS = ("data.seq_length", "model.config.seq_length")
"""The length of a sample, as the data and as the model have it."""

logging.getLogger(parse_cli_args.__module__).setLevel(logging.CRITICAL)  # it logs what becomes our UserError

_FORM = re.compile(r"(?P<path>[A-Za-z_][\w.\[\]]*)\s*(?:[-+*/|&]|//)?=(?P<value>.*)", re.DOTALL)


def apply(partial: run.Partial, overrides: list[str]) -> None:
    """Apply each `path=value` (or another of NeMo-Run's operators, such as `*=`) and each `with=OPTION`, in order.

    Raises:
        UserError: an override is malformed, names no field of the recipe, or has a value of another type.
    """
    where = history.Location(filename="command line", line_number=0, function_name=None)
    for text in overrides:
        if text.startswith(options.PREFIX):
            with history.custom_location(lambda: where):
                options.apply(partial, text.removeprefix(options.PREFIX))
            continue
        match = _FORM.fullmatch(text)
        if match is None:
            raise UserError(f"{text!r} is not an override", "write path=value, such as trainer.max_steps=10")
        _check_path(partial, match["path"])
        if short := shorthands.meant(text):
            with history.custom_location(lambda: where):
                short(partial, match["value"])
            continue
        try:
            with history.custom_location(lambda: where):
                if not _set_unresolved(partial, match["path"], text):
                    parse_cli_args(cast(Any, partial), [text])  # annotated as a function, and made for a Partial too
                _numbers_are_numbers(partial, match["path"])
                _none_is_none(partial, match["path"])
        except CLIException:
            annotation = _annotation(*_locate(partial, match["path"]))
            kind = annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
            raise UserError(
                f"override {text!r}: {match['path']} takes {kind}, not {match['value']!r}",
                f"write {match['path']}=VALUE with a value of {kind}",
            ) from None


def keep_one_length(partial: run.Partial, overrides: Sequence[str]) -> None:
    """Make the data's and the model's length of a sample one, where an override has moved one of them."""
    reader = Reader(partial, tuple(overrides))
    moved = [path for path in LENGTHS if reader.overridden(path) and isinstance(reader[path], int)]
    if len(moved) == 1:
        partial.data.seq_length = partial.model.config.seq_length = reader[moved[0]]


def _check_path(partial: run.Partial, path: str) -> None:
    """Refuse a path that names no field. NeMo's strategy takes `**kwargs` and would accept a misspelling."""
    node: Any = partial
    seen: list[str] = []
    for part in path.split("."):
        name, *indices = re.split(r"[\[\]]+", part.rstrip("]"))
        if isinstance(node, fdl.Buildable):
            known = parameters(fdl.get_callable(node))
            if name not in known:
                spot = ".".join(seen) or "the recipe"
                hint = (
                    did_you_mean(name, known) or f"`recipes show` lists what is set; {spot} takes {len(known)} fields"
                )
                raise UserError(f"override {path}: {spot} has no field {name!r}", hint)
        elif not isinstance(node, dict):
            raise UserError(f"override {path}: {'.'.join(seen)} is {node!r} and has no fields")
        node = getattr(node, name, None) if not isinstance(node, dict) else node.get(name)
        for index in indices:
            node = _item(node, index, path)
        seen.append(part)


def _set_unresolved(partial: run.Partial, path: str, text: str) -> bool:
    """Set a field whose annotation NeMo-Run leaves a string, as all of NeMo's adapters; True if it was such a field.

    Raises:
        CLIException: the value is not of that type, or the operator is not `=`.
    """
    node, field = _locate(partial, path)
    if not isinstance(annotation := _annotation(node, field), str):
        return False
    target = fdl.get_callable(node)
    try:
        hints = get_type_hints(target) | get_type_hints(target.__init__ if isinstance(target, type) else target)
    except (NameError, TypeError):  # an annotation that is imported for type checkers only
        return False
    operator, _, value = text.partition("=")
    if operator.strip() != path or field not in hints:
        raise CLIException(f"{annotation} takes `=`", text, {})
    setattr(node, field, type_parser.parse(value.strip(), hints[field]))
    return True


def _none_is_none(partial: run.Partial, path: str) -> None:
    """Make `trainer.plugins.fp8=None` nothing: NeMo annotates `fp8: str = None`, and NeMo-Run makes it the word."""
    node, field = _locate(partial, path)
    target = fdl.get_callable(node) if isinstance(node, fdl.Buildable) else None
    parameter = parameter_of(target, field) if target else None
    if getattr(node, field, None) in ("None", "null") and parameter is not None and parameter.default is None:
        setattr(node, field, None)


def _numbers_are_numbers(partial: run.Partial, path: str) -> None:
    """Make `trainer.devices=1` an int: NeMo-Run takes the first type of a union that fits, and a string always fits."""
    node, field = _locate(partial, path)
    value = getattr(node, field)
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value) and int in get_args(_annotation(node, field)):
        setattr(node, field, int(value))


def _locate(partial: run.Partial, path: str) -> tuple[Any, str]:
    """The node that holds the last field of `path`, and that field."""
    *parents, field = path.split(".")
    node: Any = partial
    for part in parents:
        name, *indices = re.split(r"[\[\]]+", part.rstrip("]"))
        node = getattr(node, name)
        for index in indices:
            node = node[int(index)]
    return node, field


def _annotation(node: Any, field: str) -> Any:
    parameter = parameter_of(fdl.get_callable(node), field)
    return parameter.annotation if parameter else Any


def _item(node: Any, index: str, path: str) -> Any:
    try:
        return node[int(index)]
    except (TypeError, ValueError, IndexError):
        size = len(node) if isinstance(node, list | tuple) else 0
        raise UserError(f"override {path}: there is no item [{index}]", f"it has {size} items, from 0") from None


def require_known_names(partial: run.Partial, where: str) -> None:
    """Refuse an argument that a class takes only by its `**kwargs`, and that none of its bases has.

    Of classes other than strategies, which hand such arguments to others, one is refused that is nearly a known name.

    Raises:
        UserError: with the names that are near.
    """
    import difflib

    from fiddle import daglish
    from torch.nn.parallel import DistributedDataParallel

    for node, _ in daglish.iterate(partial):
        target = fdl.get_callable(node) if isinstance(node, fdl.Buildable) else None
        if not isinstance(target, type):
            continue
        known = parameters(target)
        if "Strategy" in target.__name__:  # Lightning's DDPStrategy hands what is left to PyTorch's
            known += parameters(DistributedDataParallel)
        for name in [name for name in node.__arguments__ if isinstance(name, str) and name not in known]:
            if "Strategy" in target.__name__ or difflib.get_close_matches(name, known, n=1, cutoff=0.85):
                hint = did_you_mean(name, known) or f"it takes {len(known)} others: see NeMo's {target.__name__}"
                raise UserError(f"{where}: {target.__name__} has no argument {name!r}", hint)
