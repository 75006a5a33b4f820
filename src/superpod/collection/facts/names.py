"""What a name means: `meta-llama/Llama-3.1-8B`, `Llama-3.1-8B-Instruct` or `LLAMA31-8B` for our `llama31_8b`.

A name is cut into words and numbers. It is read only where all of them are those of one of our names, or of one
Hugging Face id in `hf_ids.toml`, in their order: no part is guessed, left out or added. Needs no NeMo.
"""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path

from superpod.errors import UserError, did_you_mean

IDS = Path(__file__).with_name("hf_ids.toml")
HUB = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/", re.IGNORECASE)
PART = re.compile(r"\d+x\d+b|\d+(?:[.p]\d+)?[bm](?![a-z0-9])|v\d+(?:\.\d+)*(?![a-z0-9])|\d+(?:\.\d+)*|[a-z]+")
"""A size (8x7b, 1.5b, 1p5b, 270m), a release (v0.3), a number, or a word."""
STRANGE = re.compile(r"[^A-Za-z0-9\s._/:+-]")
"""What no name holds: a star, a space without width, a letter of another script. It is not left out, but refused."""
LONGEST = 200
"""Letters of a name; a longer text is a shape by hand, or none."""

Key = tuple[str, ...]


def read(text: str) -> str:
    """Our name for what `text` names; `text` itself where it is our name already, a path, or nothing that is known.

    Raises:
        UserError: it may be one of several, or it is an id of an organisation of the table that the table lacks.
    """
    plain = HUB.sub("", text.strip(), count=1).rstrip("/") if HUB.match(text.strip()) else text
    if _is_something_else(plain) or _is_ours(plain):
        return plain
    if "/" in plain:
        return _of_id(plain)
    key = parts(plain)
    names = _table().get(key, frozenset())
    if len(names) > 1:
        raise UserError(f"{text!r} may be {' or '.join(sorted(names))}", "name one of them")
    return next(iter(names), "") or _recipe(key) or _refuse_if_several(text, key)


def read_word(text: str) -> str:
    """As `read`, for one of several words that a name contains: `h100` is none of a model, and nothing is refused."""
    if _is_something_else(text) or _is_ours(text):
        return text
    if "/" in text:
        return ids().get(HUB.sub("", text, count=1).lower(), text)
    names = _table().get(parts(text), frozenset())
    return next(iter(names)) if len(names) == 1 else text


def _is_ours(text: str) -> bool:
    """Whether it is a name of ours, or at least a recipe's of a model of ours, in our spelling. Reads no layouts."""
    if not re.fullmatch(r"[a-z0-9_.]+", text):
        return False
    ours = _models()
    return text in ours or any(text.startswith(f"{name}_") for name in ours)


@cache
def _models() -> dict[str, None]:
    """Models with recipes, and those that are only planned."""
    from superpod.collection import declarations
    from superpod.planner import models
    from superpod.planner.models import table

    return dict.fromkeys([*declarations.models(), *models.names(), *table.aliases()])


@cache
def ids() -> dict[str, str]:
    """Hugging Face id, in small letters -> our model."""
    return {one.lower(): model for model, names in published().items() for one in names}


@cache
def published() -> dict[str, list[str]]:
    """Our model -> its Hugging Face ids, the one that fine-tuning starts from first."""
    return tomllib.loads(IDS.read_text(encoding="utf-8"))


def parts(text: str) -> Key:
    """The words and numbers of a name, in one spelling: `Qwen2.5-0.5B` -> qwen 25 500m, as in `qwen25_500m`."""
    pieces = [PART.findall(piece) for piece in re.split(r"[^a-z0-9.]+", text.lower())]
    return tuple(_spelling(part) for piece in pieces for part in piece)


def _spelling(part: str) -> str:
    if re.fullmatch(r"0[.p]\d+b", part):  # 0.5b is our 500m
        return f"{round(float(part[:-1].replace('p', '.')) * 1000)}m"
    if part[-1] in "bm" and part[0].isdigit():
        return part.replace(".", "p")
    return part.replace(".", "")


def _is_something_else(text: str) -> bool:
    """A path, a file, a shape by hand, or NeMo's own recipe."""
    if len(text) > LONGEST or not text.strip() or STRANGE.search(text) or text.startswith("nemo:"):
        return True
    return text.endswith((".py", ".json", ".toml")) or "\0" in text or Path(text).exists()


def _of_id(text: str) -> str:
    """The model of an id with its organisation; a text that is of none of them is a path."""
    organisation = text.lower().partition("/")[0]
    if text.lower() in ids() or organisation not in {one.partition("/")[0] for one in ids()}:
        return ids().get(text.lower(), text)
    near = [one for names in published().values() for one in names if one.lower().startswith(f"{organisation}/")]
    hint = did_you_mean(text, near) or "`recipes list` shows the models."
    raise UserError(
        f"{text} is no model that is known here",
        f"{hint} Or plan it by its own sizes: recipes plan FOLDER_WITH_ITS_CONFIG_JSON --gpu h100 --nodes 1",
    )


def near(text: str) -> str:
    """A hint naming the closest Hugging Face ids of a text with a slash; the empty string when none is close."""
    return did_you_mean(text, [one for ids in published().values() for one in ids]) if "/" in text else ""


@cache
def _table() -> dict[Key, frozenset[str]]:
    """Parts of every name and id -> the models that they are of."""
    from superpod.planner.models import table

    keys: dict[Key, set[str]] = defaultdict(set)
    for name in _models():
        keys[parts(name)].add(name)
    for one, name in ids().items():
        for spelling in _spellings(one.rpartition("/")[2]):
            keys[spelling].add(name)
    aliases = table.aliases()  # another name of the same model is no other model
    return {key: frozenset(name for name in names if aliases.get(name) not in names) for key, names in keys.items()}


def _spellings(name: str) -> set[Key]:
    """An id's parts; with a release such as 3.1 also as `3 1`, which people write `llama3_1`; without `Meta`."""
    bare = re.sub(r"^(meta|nvidia)-", "", name)
    split = re.sub(r"(?<![\d.])(\d)\.(\d)(?![\d.bm])", r"\1-\2", bare)
    joined = re.sub(r"(?<![\d.])(\d)_(\d)(?![\d.bm])", r"\1.\2", bare)
    return {parts(one) for one in (name, bare, split, joined)}


def _recipe(key: Key) -> str:
    """The recipe whose name is a model's, in any spelling, and the parts of its own behind it; "" = none."""
    from superpod.collection import declarations

    for length in range(len(key) - 1, 0, -1):
        names = _table().get(key[:length], frozenset())
        for recipe in declarations.recipes().values() if names else ():
            if recipe.model.name in names and parts(recipe.suffix) == key[length:]:
                return recipe.name
    return ""


def _refuse_if_several(text: str, key: Key) -> str:
    """The text, for others to refuse, unless some models have all of its parts: these are named.

    Raises:
        UserError: with the models that it may be.
    """
    names = dict.fromkeys(name for whole, models in _table().items() if _within(key, whole) for name in models)
    if len(key) < 2 or not names:
        return text
    shown = " or ".join([*names][:6]) + (" or another" if len(names) > 6 else "")
    raise UserError(f"{text!r} may be {shown}", "name one of them")


def _within(short: Key, whole: Key) -> bool:
    """Whether the parts of `short` stand in `whole`, in their order."""
    rest = iter(whole)
    return all(part in rest for part in short)
