"""Write the steps between checkpoints to layout files: `python scripts/save_intervals.py [MODEL...] [--anew]`.

Recipes read them from the files, so that they do not change with the planner. Existing values stay; `--anew` computes
all values. `plan_layouts.py` adds the missing values of the layouts that it plans.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from superpod.collection import layout_file, recipe_job, registry, save_interval
from superpod.collection.layout_text import Entry
from superpod.collection.registry import Recipe
from superpod.planner import predict

Saves = Mapping[str, dict[int, int]]
"""Recipe name without its model -> nodes -> steps between checkpoints."""


def fill(path: Path, *, anew: bool = False, before: Iterable[Entry] = ()) -> int:
    """Add the missing steps of all sizes to a layout file, atomically; return the number of changed lines.

    `anew`: compute existing values as well. `before`: entries whose values are kept for layouts that did not change.
    """
    text = path.read_text()
    recipes = {recipe.suffix: recipe for recipe in registry.read(registry.models()[path.stem], path)}
    saves = {
        name: {} if anew else {**_unchanged_saves(recipe, before), **recipe.saves} for name, recipe in recipes.items()
    }
    sizes = [(recipe, nodes) for recipe in recipes.values() for nodes in recipe.nodes]
    for suffix, nodes, steps in _compute_missing(sizes, saves):
        saves[suffix][nodes] = steps
    after = text
    for suffix, recipe in recipes.items():
        if saves[suffix] != recipe.saves:
            after = layout_file.replace_recipe(after, str(path), suffix, recipe.layouts, saves[suffix])
    partial = path.with_suffix(".toml.partial")
    partial.write_text(after)
    os.replace(partial, path)
    return len(set(after.splitlines()) - set(text.splitlines()))


def _unchanged_saves(recipe: Recipe, before: Iterable[Entry]) -> dict[int, int]:
    """Return nodes -> steps of the entries in `before` whose layout is still that of the recipe."""
    own = [entry for entry in before if entry.recipe == recipe.suffix]
    return {n: s for entry in own for n, s in entry.saves.items() if recipe.layouts.get(n) == entry.layouts[n]}


def _compute_missing(sizes: Sequence[tuple[Recipe, int]], known: Saves) -> Iterator[tuple[str, int, int]]:
    """Yield (recipe, nodes, steps) for the sizes that are not in `known`, from the planner's step time."""
    missing = [(recipe, nodes) for recipe, nodes in sizes if nodes not in known[recipe.suffix]]
    predictions = predict.many([recipe_job.job(recipe, nodes) for recipe, nodes in missing])
    for (recipe, nodes), prediction in zip(missing, predictions, strict=True):
        yield recipe.suffix, nodes, save_interval.choose_interval(prediction.step_time_s)


def main() -> None:
    """Update the layout files of the given models, or of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--anew", action="store_true", help="compute existing values as well")
    options = parser.parse_args()
    for name in options.models or list(registry.models()):
        path = registry.LAYOUTS / f"{name}.toml"
        if path.is_file():
            print(f"{path.name}: {fill(path, anew=options.anew)} lines", flush=True)


if __name__ == "__main__":
    main()
