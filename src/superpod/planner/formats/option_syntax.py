"""The syntax of options on a command line: `tp=4,sp` for a layout, `moments=bf16` for an option of the planner."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import groupby
from typing import TYPE_CHECKING

from superpod.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from superpod.planner.layout import Layout
    from superpod.planner.planned_job import Options

MAX_CHUNKS = 2**14
"""Maximum N in `NxM`; no pipeline has more chunks, so a larger N is a typo."""

Value = bool | int | float | str
"""Types of the value in `key=value`."""


def parse_pairs(text: str, what: str) -> dict[str, Value]:
    """Parse `tp=4,sp,recompute=full` to key -> number, boolean or string; a key without a value is true.

    Raises:
        UserError: a key is empty or set twice; the message begins with `what`.
    """
    values: dict[str, Value] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not key:
            raise UserError(f"{what} has a value without a key: {text!r}", "use KEY=VALUE, such as tp=4")
        if key in values:
            raise UserError(f"{what} sets {key} twice: {text!r}", "remove one of the two")
        values[key] = _parse_value(value) if equals else True
    return values


def parse_layout(text: str, what: str) -> dict[str, Value | tuple[Value, ...]]:
    """Parse `tp=4,recompute_modules=layernorm+mlp` to fields of `Layout`; `chunks=1+3x2` is (1, 2, 2, 2)."""
    values: dict[str, Value | tuple[Value, ...]] = {**parse_pairs(text, what)}
    for key in ("recompute_modules", "chunks"):
        if key in values:
            words = str(values[key]).split("+")
            values[key] = tuple(_parse_value(element) for word in words for element in _expand_repeats(word))
    return values


def change_layout(base: Layout, text: str, what: str = "--layout") -> Layout:
    """Return `base` with the fields in the text of `--layout`; tp > 1 enables sp unless the text sets sp.

    Raises:
        UserError: a key is unknown or a value invalid; the message begins with `what`.
    """
    if not all(part.strip() for part in text.split(",")):
        raise UserError(f"{what} {text!r} has an empty entry", "use the form tp=4,pp=2,sp")
    values = parse_layout(text, what)
    given_fields = {f.name: getattr(base, f.name) for f in fields(base) if getattr(base, f.name) is not None}
    if "tp" in values and "sp" not in values:
        given_fields["sp"] = values["tp"] != 1
    changed = _create_layout(given_fields | values, what)
    _require_positive(changed, what)
    return changed


def _require_positive(layout: Layout, what: str) -> None:
    """Raise UserError if a degree or size is below 1; the message begins with `what`."""
    for violation in layout.below_one():  # its fix is `set tp 1`
        example = "=".join(violation.fix.split()[1:])
        raise UserError(f"{what}: {violation.message}", f"use an integer of at least 1, such as {example}")


def format_layout(layout: Layout, *, with_batch: bool = False) -> str:
    """Format a layout as a value for `--layout`, such as `tp=4,pp=2,vp=4,sp,chunks=3+6x4+5`.

    Fields with default values are omitted; `with_batch` adds gbs.
    """
    parts = []
    for f in fields(layout):
        value = getattr(layout, f.name)
        is_written = with_batch if f.name == "gbs" else value != f.default
        if not is_written:
            continue
        text = "+".join(_merge_repeats(value)) if isinstance(value, tuple) else str(value)
        parts.append(f.name if value is True else f"{f.name}={text}")
    return ",".join(parts) or "tp=1"


def _merge_repeats(values: tuple[object, ...]) -> list[str]:
    """Format values as text, with `6x4` for six consecutive 4s."""
    runs = [(value, len(list(same))) for value, same in groupby(values)]
    return [f"{count}x{value}" if count > 1 else str(value) for value, count in runs]


STAGES = ("chunks", "first_layers", "last_layers", "embedding_as_layer", "loss_as_layer")
"""Fields of `Layout` that partition the layers into stages."""


def layout_for_model(base: Layout, text: str, layers: int) -> tuple[Layout, str]:
    """Return `change_layout(base, text)` with the default partition of `layers`, unless a field in STAGES is set.

    Returns:
        The layout, and a note on the partition if the layers are not divisible by the number of chunks, else "".
    """
    from superpod.planner.models.stages import default_partition

    changed = change_layout(base, text)
    if any(getattr(changed, key) not in (None, False) for key in STAGES):
        return changed, ""
    fields_of_stages, note = default_partition(layers, changed.pp, changed.vp or 1)
    return changed.replace(**fields_of_stages), note


def parse_fixed(text: str | None, what: str = "--fix") -> dict[str, Value | tuple[Value, ...]]:
    """Parse the text of `--fix` to fields of `Layout`; `search.Space` refuses those that a search cannot fix.

    Raises:
        UserError: the text cannot be parsed, or a value is invalid.
    """
    from superpod.planner.layout import Layout

    values = parse_layout(text, what) if text else {}
    field_names = {f.name for f in fields(Layout)}
    _require_positive(_create_layout({k: v for k, v in values.items() if k in field_names}, what), what)
    return values


def _create_layout(values: dict[str, Value | tuple[Value, ...]], what: str) -> Layout:
    """Create a layout; the hint of its UserError is a similar valid value."""
    from superpod.planner.layout import Layout

    try:
        return Layout.from_mapping(values, what)
    except UserError as wrong:
        raise UserError(str(wrong), wrong.hint or next(_layout_hints(values), "")) from wrong


def _layout_hints(values: dict[str, Value | tuple[Value, ...]]) -> Iterator[str]:
    """Yield a hint for each invalid key or value of a layout."""
    from superpod.planner.layout import CHOICES, MODULES, Layout

    field_names = [f.name for f in fields(Layout)]
    for key, value in values.items():
        if key not in field_names:
            stages = "|" in f"{key}{value}"  # Megatron's syntax
            yield "specify the layers of each stage as chunks=17+15" if stages else f"keys: {', '.join(field_names)}"
        default = getattr(Layout(), key, None)
        choices = ["true", "false"] if isinstance(default, bool) else list(CHOICES.get(key, ()))
        if key == "recompute_modules" and isinstance(value, tuple):
            yield from filter(None, (did_you_mean(str(name), list(MODULES)) for name in value if name not in MODULES))
        elif choices and str(value).lower() not in choices:
            yield did_you_mean(str(value).lower(), choices) or f"for example {key}={choices[0]}"
        elif not choices and key != "chunks" and not isinstance(value, int):
            yield f"use an integer of at least 1, such as {key}={default or 2}"
        elif key == "chunks" and not (isinstance(value, tuple) and all(isinstance(count, int) for count in value)):
            yield "specify the layers of each chunk, such as chunks=3+6x4+5"


def change_options(base: Options, texts: list[str], what: str = "--option") -> Options:
    """Return `base` with options set by texts such as `moments=bf16` or `lora_targets=linear_qkv,linear_proj`.

    Raises:
        UserError: an option is unknown or a value invalid; the message begins with `what`.
    """
    defaults = {f.name: getattr(base, f.name) for f in fields(base)}
    lists = {name for name, value in defaults.items() if isinstance(value, tuple)}
    text = _join_list_items(",".join(texts), lists, set(defaults))
    values: dict[str, Value | tuple[str, ...]] = {**parse_pairs(text, what)}
    for key, value in values.items():
        if key not in defaults:
            raise UserError(f"there is no option {key!r}", did_you_mean(key, list(defaults)) or ", ".join(defaults))
        if key in lists:
            values[key] = () if value is True else tuple(str(value).split("+"))
        elif key == "release" and not re.fullmatch(r"NeMo \d\d\.\d\d", str(value)):
            raise UserError(f"{what} release={value!r} is invalid", f"for example {what} 'release=NeMo 25.09'")
        elif value is True and not isinstance(defaults[key], bool):
            raise UserError(f"{what} {key} has no value", _example(what, key, defaults[key]))
        elif isinstance(defaults[key], float) and isinstance(value, int) and not isinstance(value, bool):
            values[key] = float(value)
    _refuse_unknown_names({key: value for key, value in values.items() if isinstance(value, tuple)}, defaults, what)
    changed = base
    for key, value in values.items():  # one at a time, so that an error can name the option
        changed = _with_option(changed, key, value, what)
    return changed


def _with_option(base: Options, key: str, value: Value | tuple[str, ...], what: str) -> Options:
    """Return `base` with one option changed. Raises UserError for an invalid value; its hint is a similar valid one."""
    from superpod.planner.planned_job import describe_values

    default, (kind, choices) = getattr(base, key), describe_values(key)
    if not isinstance(value, tuple) and default is not None and type(value) is not type(default):
        raise UserError(f"{what} {key} must be {kind}, not {value!r}", _suggest(value, choices, what, key, default))
    try:
        return replace(base, **{key: value})
    except UserError as wrong:
        hint = wrong.hint or _suggest(value, choices, what, key, default)
        raise UserError(f"{what} {wrong}", hint) from wrong


def _suggest(value: object, choices: tuple[str, ...], what: str, key: str, default: object) -> str:
    """Return a hint: a valid value similar to `value`, else an example."""
    return did_you_mean(str(value), list(choices)) or _example(what, key, default)


def _example(what: str, key: str, default: object) -> str:
    """Return a hint with a valid value of an option; `what` is the command-line option, such as `--option`."""
    if default is None:
        return f"for example {what} {key}=1, or omit it"
    if isinstance(default, bool):
        return f"use {what} {key}=true or {what} {key}=false"
    word = f"{default:g}" if isinstance(default, float) else default
    return f"use {what} {key}={word}, the default, or a different value"


def _join_list_items(text: str, lists: set[str], known: set[str]) -> str:
    """Join the items of lists with + instead of commas, so that commas separate only options.

    A part that is neither `key=value` nor in `known`, the names of options, belongs to the preceding option in `lists`.
    """
    parts: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        has_no_value = "=" not in part and part not in known
        if has_no_value and parts and parts[-1].partition("=")[0].strip() in lists:
            parts[-1] += f"+{part}"
        else:
            parts.append(part)
    return ",".join(parts)


def _refuse_unknown_names(lists: dict[str, tuple[str, ...]], defaults: dict[str, tuple[str, ...]], what: str) -> None:
    """Raise UserError for an empty list, or an item that is not in `defaults`, which contain all valid items."""
    for key, names in lists.items():
        for name in names:
            if name not in defaults[key]:
                hint = did_you_mean(name, list(defaults[key])) or f"supported: {', '.join(defaults[key])}"
                raise UserError(f"{what} {key} does not support {name!r}", hint)
        if not names:
            raise UserError(f"{what} {key} is empty", f"supported: {', '.join(defaults[key])}")


def _expand_repeats(word: str) -> list[str]:
    """Expand `6x2` to six times 2; return any other text unchanged."""
    match = re.fullmatch(r"(\d{1,6})x(\d{1,6})", word)
    if match is None:
        return [word]
    if int(match[1]) > MAX_CHUNKS:
        raise UserError(f"--layout: {word} is {int(match[1]):,} chunks", f"use at most {MAX_CHUNKS:,}")
    return [match[2]] * int(match[1])


def _parse_value(text: str) -> Value:
    """Parse text to a boolean, integer or number if it is one, else return it unchanged."""
    lower = text.lower()
    if lower in ("true", "false"):
        return lower == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
