"""Plan every recipe's layout: `python scripts/plan_layouts.py [MODEL...] [--published step_time.csv] [--anew]`.

Writes collection/layouts/MODEL.toml anew, with the steps between two checkpoints (`save_intervals.py`). Per model and
task: search GPUs of each memory size, and each kind of precision; take the fewest layouts that are each within 3 % of
the fastest wherever they are used, which is less than the planner errs, one for all sizes of a recipe where there is
one; put recipes of a GPU that come out alike into one table. What a file declares already stays unless the fastest is
better by more than twice the planner's error: a recipe does not move with every fit; --anew takes no notice of it. So
does the layout of a measured run of the same case that was published; --published also writes those cases to
collection/published.toml. Read the diff before committing: this plans, people review.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import published_layouts
import save_intervals
from layout_cases import Case, cases
from layout_choice import forget_searches, plan
from published_layouts import Runs
from superpod.collection import layout_text, registry
from superpod.collection.layout_text import Group
from superpod.collection.registry import TASKS
from superpod.planner import hardware
from superpod.planner.layout import Layout

Planned = dict[Case, dict[int, Layout]]
"""Case -> GPUs -> layout."""

HEAD = (
    "# By scripts/plan_layouts.py: planned to within 3 % of the fastest that leaves 5 % of memory, as few as that "
    "takes.\n"
    "# A line is the whole layout on that many nodes; fields that it leaves out: planner/layout.py.\n"
    "# save_every: steps between two checkpoints, from the step time that was predicted (nemo2/build/resilience.py).\n"
)


def write(name: str, planned: list[Planned], runs: Runs) -> Path:
    """The layouts of a model as its file, whole or not at all; of tasks not planned, those it has."""
    path = registry.LAYOUTS / f"{name}.toml"
    partial = path.with_suffix(".toml.partial")
    partial.write_text(text_of(path.read_text() if path.is_file() else "", planned, runs))
    os.replace(partial, path)
    return path


def declared(groups: Iterable[Group]) -> dict[tuple[str, int], Layout]:
    """What the groups of a layout file have: (recipe's name without its model, GPUs) -> layout."""
    return {
        (suffix, nodes * hardware.node(registry.recipe_facts(suffix, group.where)["gpu"]).gpus): layout
        for group in groups
        for suffix in group.recipes
        for nodes, layout in group.layouts.items()
    }


def text_of(old: str, planned: list[Planned], runs: Runs) -> str:
    """A layout file's text: the planned groups after those of `old` whose tasks were not planned."""
    tasks = {case.task for group in planned for case in group}
    kept = [block.strip() for block in old.split("\n\n") if "[[layouts]]" in block and not tasks & _tasks_of(block)]
    return "\n".join([HEAD, *(f"{block}\n" for block in kept), *(_tables(group, runs) for group in planned)])


def _tasks_of(block: str) -> set[str]:
    (group,) = layout_text.parse(block, "layouts")
    return {registry.recipe_facts(suffix, group.where)["task"] for suffix in group.recipes}


def _tables(group: Planned, runs: Runs) -> str:
    """The tables of a group: cases of one GPU that are laid out alike share one."""
    alike: dict[str, dict[str, list[Case]]] = defaultdict(lambda: defaultdict(list))
    for case, layouts in group.items():
        alike[repr(_by_nodes(case, layouts))][case.gpu].append(case)
    return "\n".join(
        "".join(_remarks(same, group, runs))
        + layout_text.group_text([case.suffix for case in same], _by_nodes(same[0], group[same[0]]), {})
        for by_gpu in alike.values()
        for same in by_gpu.values()
    )


def _by_nodes(case: Case, layouts: dict[int, Layout]) -> dict[int, Layout]:
    per_node = hardware.node(case.gpu).gpus
    return {max(gpus // per_node, 1): layout for gpus, layout in sorted(layouts.items())}


def _remarks(alike: list[Case], group: Planned, runs: Runs) -> Iterator[str]:
    """A comment for each published run of a table's recipes."""
    for case in alike:
        for gpus, layout in sorted(group[case].items()):
            if run := runs.get((case.suffix, gpus)):
                same = replace(run.layout, gbs=case.gbs) == layout
                verdict = "as published" if same else f"published: {run.layout.short()}"
                yield f"# {case.gpu} {case.precision} on {gpus} GPUs: {verdict}, {run.release}.\n"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--published", type=Path)
    parser.add_argument("--anew", action="store_true", help="take no notice of the layouts that are declared")
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=TASKS, help="others stay as they are")
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
