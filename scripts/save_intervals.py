"""Write the steps between two checkpoints into layout files: `python scripts/save_intervals.py [MODEL...] [--anew]`.

A recipe takes them from its file, so that it stays as it is when the planner learns better. Those that a file gives
stay; `--anew` computes all. `plan_layouts.py` does it for what it plans, and keeps those of layouts that stay.
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
"""Recipe's name without its model -> nodes -> steps."""


def fill(path: Path, *, anew: bool = False, before: Iterable[Entry] = ()) -> int:
    """Give every size of a layout file its steps, whole or not at all; how many lines have changed.

    `before`: what the file had, whose steps stay wherever the layout does.
    """
    text = path.read_text()
    recipes = {recipe.suffix: recipe for recipe in registry.read(registry.models()[path.stem], path)}
    saves = {name: {} if anew else {**_unmoved(recipe, before), **recipe.saves} for name, recipe in recipes.items()}
    sizes = [(recipe, nodes) for recipe in recipes.values() for nodes in recipe.nodes]
    for suffix, nodes, steps in _computed(sizes, saves):
        saves[suffix][nodes] = steps
    after = text
    for suffix, recipe in recipes.items():
        if saves[suffix] != recipe.saves:
            after = layout_file.replace_recipe(after, str(path), suffix, recipe.layouts, saves[suffix])
    partial = path.with_suffix(".toml.partial")
    partial.write_text(after)
    os.replace(partial, path)
    return len(set(after.splitlines()) - set(text.splitlines()))


def _unmoved(recipe: Recipe, before: Iterable[Entry]) -> dict[int, int]:
    """Nodes -> steps that a recipe had at the sizes whose layout is as it was."""
    own = [entry for entry in before if entry.recipe == recipe.suffix]
    return {n: s for entry in own for n, s in entry.saves.items() if recipe.layouts.get(n) == entry.layouts[n]}


def _computed(sizes: Sequence[tuple[Recipe, int]], known: Saves) -> Iterator[tuple[str, int, int]]:
    """(recipe, nodes, steps) of the sizes that are not known, by the planner's step time."""
    missing = [(recipe, nodes) for recipe, nodes in sizes if nodes not in known[recipe.suffix]]
    predictions = predict.many([recipe_job.job(recipe, nodes) for recipe, nodes in missing])
    for (recipe, nodes), prediction in zip(missing, predictions, strict=True):
        yield recipe.suffix, nodes, save_interval.choose_interval(prediction.step_time_s)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--anew", action="store_true", help="compute those that a file gives too")
    options = parser.parse_args()
    for name in options.models or list(registry.models()):
        path = registry.LAYOUTS / f"{name}.toml"
        if path.is_file():
            print(f"{path.name}: {fill(path, anew=options.anew)} lines", flush=True)


if __name__ == "__main__":
    main()
