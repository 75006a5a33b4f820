"""The small languages of a command line: `tp=4,sp` for a layout, `moments=bf16` for an option, a model's shape."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from superpod.planner.layout import Layout
    from superpod.planner.planned_job import Options

MOST_CHUNKS = 2**14
"""Of one `NxM`: more chunks than any pipeline has are a slip of the hand."""


def pairs(text: str, what: str) -> dict[str, Any]:
    """`tp=4,sp,recompute=full` as a mapping: numbers, true and false, words; a bare word is true; + joins a list."""
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key in found:
            raise UserError(f"{what} says {key} twice: {text!r}")
        found[key] = _value(value) if equals else True
    return found


def layout_values(text: str, what: str) -> dict[str, Any]:
    """Fields of `Layout` of a text such as `tp=4,sp,recompute_modules=layernorm+mlp`; `chunks=1+3x2` is 1, 2, 2, 2."""
    values = pairs(text, what)
    for key in ("recompute_modules", "chunks"):
        if key in values:
            words = str(values[key]).split("+")
            values[key] = tuple(_value(each) for word in words for each in _repeated(word))
    return values


def layout(base: Layout, text: str) -> Layout:
    """`base` with what `--layout` says; a tp above 1 brings sp with it, where nothing is said of sp.

    Raises:
        UserError: on an unknown key, or a value that none of its kind can have.
    """
    from superpod.planner.layout import Layout

    values = layout_values(text, "--layout")
    kept = {f.name: getattr(base, f.name) for f in fields(base) if getattr(base, f.name) is not None}
    if "tp" in values and "sp" not in values:
        kept["sp"] = values["tp"] != 1
    found = Layout.from_mapping(kept | values, "--layout")
    if wrong := found.below_one():
        raise UserError(f"--layout: {wrong[0].message}")
    return found


def options(base: Options, texts: list[str]) -> Options:
    """`base` with what each `--option` says: `moments=bf16`, `deterministic`, `lora_targets=linear_qkv,linear_proj`.

    Raises:
        UserError: on an unknown name, or a value of another kind than the option's.
    """
    known = {f.name: getattr(base, f.name) for f in fields(base)}
    lists = {name for name, value in known.items() if isinstance(value, tuple)}
    values = pairs(_joined(",".join(texts), lists, set(known)), "--option")
    for key, value in values.items():
        if key not in known:
            raise UserError(f"no option is called {key!r}", did_you_mean(key, list(known)) or ", ".join(known))
        if key in lists:
            values[key] = () if value is True else tuple(str(value).split("+"))
        elif isinstance(known[key], float) and isinstance(value, int) and not isinstance(value, bool):
            values[key] = float(value)
        elif known[key] is not None and type(value) is not type(known[key]):
            raise UserError(f"--option {key} is like {known[key]!r}, not {value!r}")
    _names(values, known, lists)
    return replace(base, **values)


def _joined(text: str, lists: set[str], known: set[str]) -> str:
    """The text with the names of a list joined by + where commas separate them: a bare word that is no option's."""
    found: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        bare = "=" not in part and part not in known
        if bare and found and found[-1].partition("=")[0].strip() in lists:
            found[-1] += f"+{part}"
        else:
            found.append(part)
    return ",".join(found)


def _names(values: dict[str, Any], known: dict[str, Any], lists: set[str]) -> None:
    """Refuse a name that the option's default, which names all there are, does not hold."""
    for key in lists & set(values):
        for name in values[key]:
            if name not in known[key]:
                hint = did_you_mean(name, list(known[key])) or f"of {', '.join(known[key])}"
                raise UserError(f"--option {key} cannot name {name!r}", hint)
        if not values[key]:
            raise UserError(f"--option {key} names nothing", f"of {', '.join(known[key])}")


def _repeated(word: str) -> list[str]:
    """`6x2` is six times 2; anything else is itself."""
    match = re.fullmatch(r"(\d{1,6})x(\d{1,6})", word)
    if match is None:
        return [word]
    if int(match[1]) > MOST_CHUNKS:
        raise UserError(f"--layout: {word} is {int(match[1]):,} chunks", f"{MOST_CHUNKS:,} at the most")
    return [match[2]] * int(match[1])


def _value(text: str) -> Any:
    low = text.lower()
    if low in ("true", "false"):
        return low == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
