"""Translate names such as `meta-llama/Llama-3.1-8B`, `Llama-3.1-8B-Instruct` or `LLAMA31-8B` to `llama31_8b`.

A name is split into words and numbers. It is accepted only if they are exactly those of a name in this project, or of a
Hugging Face ID in `hf_ids.toml`, in the same order: no part is guessed, omitted or added. Does not need NeMo.
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
INVALID = re.compile(r"[^A-Za-z0-9\s._/:+-]")
"""Characters that no name contains, such as asterisks, zero-width spaces and letters of other scripts."""
MAX_LENGTH = 200
"""Maximum length of a name. A longer text may be a model shape."""

Key = tuple[str, ...]


def translate(text: str) -> str:
    """Return this project's name for a name or Hugging Face ID; an unknown name or a path is returned unchanged.

    Raises:
        UserError: the name is ambiguous, or an unknown ID of a known organization.
    """
    name = HUB.sub("", text.strip(), count=1).rstrip("/") if HUB.match(text.strip()) else text
    if _is_other_input(name) or _is_canonical(name):
        return name
    if "/" in name:
        return _translate_id(name)
    key = split_name(name)
    names = _index_models().get(key, frozenset())
    if len(names) > 1:
        raise UserError(f"{text!r} is ambiguous: {' or '.join(sorted(names))}", "choose one of them")
    return next(iter(names), "") or _find_recipe(key) or _refuse_if_ambiguous(text, key)


def translate_word(text: str) -> str:
    """Return the model name for a search word; ambiguous words, and words such as h100, are returned unchanged."""
    if _is_other_input(text) or _is_canonical(text):
        return text
    if "/" in text:
        return load_ids().get(HUB.sub("", text, count=1).lower(), text)
    names = _index_models().get(split_name(text), frozenset())
    return next(iter(names)) if len(names) == 1 else text


def _is_canonical(text: str) -> bool:
    """Return whether a text is a model name, or begins with one like a recipe name. Layouts are not read."""
    if not re.fullmatch(r"[a-z0-9_.]+", text):
        return False
    model_names = _list_model_names()
    return text in model_names or any(text.startswith(f"{name}_") for name in model_names)


@cache
def _list_model_names() -> dict[str, None]:
    """Return the names of models with recipes, of models that can only be planned, and aliases."""
    from superpod.collection import declarations
    from superpod.planner import models
    from superpod.planner.models import table

    return dict.fromkeys([*declarations.models(), *models.names(), *table.aliases()])


@cache
def load_ids() -> dict[str, str]:
    """Return the model names by Hugging Face ID in lower case."""
    return {hf_id.lower(): model for model, hf_ids in load_hub_ids().items() for hf_id in hf_ids}


@cache
def load_hub_ids() -> dict[str, list[str]]:
    """Return the Hugging Face IDs by model name. Fine-tuning starts from the first ID."""
    return tomllib.loads(IDS.read_text(encoding="utf-8"))


def split_name(text: str) -> Key:
    """Return the words and numbers of a name in normalized spelling: (qwen, 25, 500m) for `Qwen2.5-0.5B`."""
    pieces = [PART.findall(piece) for piece in re.split(r"[^a-z0-9.]+", text.lower())]
    return tuple(_normalize(part) for piece in pieces for part in piece)


def _normalize(part: str) -> str:
    if re.fullmatch(r"0[.p]\d+b", part):  # 0.5b becomes 500m
        return f"{round(float(part[:-1].replace('p', '.')) * 1000)}m"
    if part[-1] in "bm" and part[0].isdigit():
        return part.replace(".", "p")
    return part.replace(".", "")


def _is_other_input(text: str) -> bool:
    """Return whether a text is a path, a model shape, or a recipe of NeMo, not a name to translate."""
    if len(text) > MAX_LENGTH or not text.strip() or INVALID.search(text) or text.startswith("nemo:"):
        return True
    return text.endswith((".py", ".json", ".toml")) or "\0" in text or Path(text).exists()


def _translate_id(text: str) -> str:
    """Return the model for a Hugging Face ID; the text itself, which may be a path, for an unknown organization.

    Raises:
        UserError: the ID is unknown, but its organization is known.
    """
    organization = text.lower().partition("/")[0]
    if text.lower() in load_ids() or organization not in {hf_id.partition("/")[0] for hf_id in load_ids()}:
        return load_ids().get(text.lower(), text)
    same_organization = [
        hf_id for hf_ids in load_hub_ids().values() for hf_id in hf_ids if hf_id.lower().startswith(f"{organization}/")
    ]
    hint = did_you_mean(text, same_organization) or "`recipes list` lists the models."
    raise UserError(
        f"{text} is not a known model",
        f"{hint} Or plan it from its config.json: `recipes plan FOLDER_OF_CONFIG_JSON --gpu h100 --nodes 1`",
    )


def suggest_ids(text: str) -> str:
    """Return a hint with the Hugging Face IDs most similar to a text with a slash, or ""."""
    if "/" not in text:
        return ""
    return did_you_mean(text, [hf_id for hf_ids in load_hub_ids().values() for hf_id in hf_ids])


@cache
def _index_models() -> dict[Key, frozenset[str]]:
    """Return the model names by the parts (see `split_name`) of their names and Hugging Face IDs."""
    from superpod.planner.models import table

    keys: dict[Key, set[str]] = defaultdict(set)
    for name in _list_model_names():
        keys[split_name(name)].add(name)
    for hf_id, name in load_ids().items():
        for spelling in _list_spellings(hf_id.rpartition("/")[2]):
            keys[spelling].add(name)
    aliases = table.aliases()  # an alias and its model do not make a name ambiguous
    return {key: frozenset(name for name in names if aliases.get(name) not in names) for key, names in keys.items()}


def _list_spellings(name: str) -> set[Key]:
    """Return the parts of an ID in all its spellings: without `Meta` or `NVIDIA`, and with `3_1` for 3.1."""
    short_name = re.sub(r"^(meta|nvidia)-", "", name)
    dashed = re.sub(r"(?<![\d.])(\d)\.(\d)(?![\d.bm])", r"\1-\2", short_name)
    dotted = re.sub(r"(?<![\d.])(\d)_(\d)(?![\d.bm])", r"\1.\2", short_name)
    return {split_name(variant) for variant in (name, short_name, dashed, dotted)}


def _find_recipe(key: Key) -> str:
    """Return the recipe name with the given parts, where the model may have any spelling; "" if there is none."""
    from superpod.collection import declarations

    for length in range(len(key) - 1, 0, -1):
        names = _index_models().get(key[:length], frozenset())
        if not names:
            continue
        for recipe in declarations.recipes().values():
            if recipe.model.name in names and split_name(recipe.suffix) == key[length:]:
                return recipe.name
    return ""


def _refuse_if_ambiguous(text: str, key: Key) -> str:
    """Return the text unchanged. `key` are its parts.

    Raises:
        UserError: all its parts are in the names of some models, which the message lists.
    """
    names = dict.fromkeys(
        name for known, models in _index_models().items() if _is_subsequence(key, known) for name in models
    )
    if len(key) < 2 or not names:
        return text
    candidates = " or ".join([*names][:6])
    if len(names) > 6:
        candidates += " or another"
    raise UserError(f"{text!r} is ambiguous: {candidates}", "choose one of them")


def _is_subsequence(short: Key, long: Key) -> bool:
    """Return whether `long` contains the parts of `short` in the same order."""
    rest_of_long = iter(long)
    return all(part in rest_of_long for part in short)
