"""Plan every recipe's layout: `python scripts/plan_layouts.py [MODEL...] [--published step_time.csv] [--anew]`.

Replaces recipes/layouts/MODEL.toml, with the steps between checkpoints (`save_intervals.py`). For each model and task,
it searches GPUs of each memory size in each kind of precision, and selects the fewest layouts that are within 3 % of
the fastest (less than the planner's error) wherever they are used; one for all sizes of a recipe if possible.

A declared layout stays unless the fastest is better by more than twice the planner's error, so that recipes do not
change with every fit; --anew ignores declared layouts. The layout of a published run of the same case stays likewise;
--published also writes these cases to recipes/published.toml. Review the diff before you commit it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import published_layouts
import save_intervals
from layout_cases import Case, cases
from layout_choice import forget_searches, plan
from published_layouts import Runs
from superpod.collection import layout_text, registry
from superpod.collection.layout_text import Entry
from superpod.collection.registry import TASKS
from superpod.planner import hardware
from superpod.planner.layout import Layout

Planned = dict[Case, dict[int, Layout]]
"""Case -> GPUs -> layout."""

HEAD = "# Written by scripts/plan_layouts.py in the format of collection/layout_text.py.\n"


def write(name: str, planned: list[Planned], runs: Runs) -> Path:
    """Write the layout file of a model atomically; tasks that were not planned keep their layouts."""
    path = registry.LAYOUTS / f"{name}.toml"
    partial = path.with_suffix(".toml.partial")
    partial.write_text(format_file(path.read_text() if path.is_file() else "", planned, runs))
    os.replace(partial, path)
    return path


def declared(entries: Iterable[Entry]) -> dict[tuple[str, int], Layout]:
    """Return (recipe name without its model, GPUs) -> layout for the entries of a layout file."""
    return {
        (entry.recipe, nodes * hardware.node(registry.recipe_facts(entry.recipe, entry.where)["gpu"]).gpus): layout
        for entry in entries
        for nodes, layout in entry.layouts.items()
    }


def format_file(old: str, planned: list[Planned], runs: Runs) -> str:
    """Return the text of a layout file: the blocks of `old` whose tasks were not planned, then the planned recipes."""
    tasks = {case.task for group in planned for case in group}
    blocks = [block.strip() for block in old.split("\n\n")]
    kept = [block for block in blocks if (found := _parse_tasks(block)) and not tasks & found]
    return "\n".join([HEAD, *(f"{block}\n" for block in kept), *(_format_block(group, runs) for group in planned)])


def _parse_tasks(block: str) -> set[str]:
    """Return the tasks of the recipes in a block of a layout file."""
    entries = layout_text.parse(block, "layouts")
    return {registry.recipe_facts(entry.recipe, entry.where)["task"] for entry in entries}


def _format_block(group: Planned, runs: Runs) -> str:
    """Format a group of recipes as a block of a layout file."""
    lines = []
    for case, layouts in group.items():
        lines += _published_comments(case, layouts, runs)
        lines += layout_text.format_entry(case.suffix, _by_nodes(case, layouts), {})
    return "\n".join(lines) + "\n"


def _by_nodes(case: Case, layouts: dict[int, Layout]) -> dict[int, Layout]:
    """Convert GPUs -> layout to nodes -> layout."""
    per_node = hardware.node(case.gpu).gpus
    return {max(gpus // per_node, 1): layout for gpus, layout in sorted(layouts.items())}


def _published_comments(case: Case, layouts: dict[int, Layout], runs: Runs) -> Iterator[str]:
    """Yield a comment for each published run of a recipe."""
    for gpus, layout in sorted(layouts.items()):
        if run := runs.get((case.suffix, gpus)):
            same = replace(run.layout, gbs=case.gbs) == layout
            verdict = "as published" if same else f"published: {run.layout.short()}"
            yield f"# {case.gpu} {case.precision} on {gpus} GPUs: {verdict}, {run.release}."


def main() -> None:
    """Plan the layouts of the given models, or of all, and write their files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--published", type=Path)
    parser.add_argument("--anew", action="store_true", help="ignore declared layouts")
    parser.add_argument(
        "--tasks", nargs="*", choices=TASKS, default=TASKS, help="tasks to plan; others keep their layouts"
    )
    options = parser.parse_args()
    published = published_layouts.read(options.published) if options.published else {}
    if published:
        published_layouts.write(published)
    for name in options.models or [name for name in registry.models() if not name.startswith("tiny_")]:
        runs = published.get(name, {})
        file = registry.LAYOUTS / f"{name}.toml"
        before = layout_text.read(file) if file.is_file() and not options.anew else []
        planned = []
        for group in (group for group in cases(name) if group[0].task in options.tasks):
            suffixes = {case.suffix for case in group}
            ran = {key: run.layout for key, run in runs.items() if key[0] in suffixes}
            planned.append(plan(group, ran, declared(before)))
        forget_searches()
        path = write(name, planned, runs)
        save_intervals.fill(path, before=before)
        print(f"{path.name}: {sum(map(len, planned))} recipes", flush=True)


if __name__ == "__main__":
    main()
