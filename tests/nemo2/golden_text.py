"""The goldens of recipes as text. Together they have every setting of every recipe, and each setting once.

- `complete/NAME.txt`: every line of a recipe, for the first model of a family.
- `models.txt`: what the first recipe of every other model and task changes in the nearest complete one.
- `variants.txt`: what other GPUs, precisions and lengths change in the first recipe of their model and task.

`models.txt` and `variants.txt` leave out what layout files say; `test_recipes.py` compares that with what is built.
"""

import hashlib
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from superpod.collection.registry import Recipe, recipes
from tests.nemo2.describe import firsts, golden_of

FINETUNED = ("llama", "qwen", "deepseek", "encoders", "ssm")
"""Families whose fine-tuning recipe is also stored completely; that of the others differs as their pretraining does."""
IN_LAYOUT_FILES = {
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "micro_batch_size",
    "global_batch_size",
    "num_nodes",
    "every_n_train_steps",
}
"""Settings that follow from a recipe's lines in its layout file alone."""
LONGEST = 2000
"""Characters of a value that is shown in full. NeMo's descriptions of pruned models have 77,000 in one value."""


def complete() -> dict[str, Recipe]:
    """Return the recipe of each complete golden."""
    chosen: dict[tuple[str, str], tuple[str, Recipe]] = {}
    for name, recipe in firsts().items():
        if recipe.task == "pretrain" or recipe.model.family in FINETUNED:
            chosen.setdefault((recipe.model.family, recipe.task), (name, recipe))
    return dict(chosen.values())


def complete_text(described: Mapping[str, Any], recipe: Recipe) -> str:
    """Return all lines of a recipe."""
    return "".join(f"{path} = {value}\n" for path, value in _lines(described, recipe).items())


def models_text(described: Mapping[str, Any]) -> str:
    """Return the differences of each model's first recipe to the nearest complete one."""
    goldens = list(complete().values())
    text = "# Settings of the first recipe of a model and task that the nearest complete golden does not have.\n"
    for recipe in firsts().values():
        family = [other for other in goldens if other.model.family == recipe.model.family]
        nearest = next((other for other in family if other.task == recipe.task), family[0])
        if nearest is not recipe:
            changed = changes(_lines(described, nearest), _lines(described, recipe))
            text += f"\n[{recipe.name} from {nearest.name}]\n{changed}"
    return text


def variants_text(described: Mapping[str, Any]) -> str:
    """Return the differences of all other recipes to the first of their model and task, grouped."""
    first_of, members = firsts(), defaultdict(list)
    for recipe in recipes().values():
        first = first_of[golden_of(recipe)]
        if recipe is not first:
            members[changes(_lines(described, first), _lines(described, recipe))].append(recipe)
    text = "# Settings of recipes that the first of their model and task does not have, and the recipes with them.\n"
    for changed in sorted(members):
        shown = changed or "nothing but what layout files say\n"
        text += f"\n{shown}{''.join(_grouped(members[changed]))}"
    return text


def changes(first: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Return a line for each part that differs, without the fields of layout files."""
    parts: dict[str, list[str]] = {}
    for path in sorted({*first, *other}):
        part, _, name = path.rpartition(".")
        if first.get(path) != other.get(path) and name not in IN_LAYOUT_FILES:
            parts.setdefault(part, []).append(f"{name} = {other[path]}" if path in other else f"{name} is not set")
    return "".join(f"{part}: {'; '.join(changed)}\n" for part, changed in parts.items())


def _grouped(alike: Iterable[Recipe]) -> Iterable[str]:
    """Group recipes by suffix, and suffixes by the models that have them."""
    models_of: dict[str, list[str]] = defaultdict(list)
    for recipe in alike:
        models_of[recipe.suffix].append(recipe.model.name)
    suffixes_of: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for suffix, models in models_of.items():
        suffixes_of[tuple(models)].append(suffix)
    for models, suffixes in suffixes_of.items():
        line = f"- {' '.join(suffixes)}: {' '.join(models)}"
        yield textwrap.fill(line, 120, subsequent_indent="    ", break_on_hyphens=False) + "\n"


def _lines(described: Mapping[str, Any], recipe: Recipe) -> dict[str, str]:
    """Return the values of a recipe by path, with `{recipe}` in place of its name."""
    return {path: _shown(value, recipe) for path, value, _ in described["lines"][recipe.name]}


def _shown(value: str, recipe: Recipe) -> str:
    if len(value) <= LONGEST:
        return value.replace(repr(recipe.name), "{recipe}")
    digest = hashlib.sha256(value.encode()).hexdigest()[:16]
    return f"{value[:40]}... ({len(value)} characters, sha256 {digest})"
