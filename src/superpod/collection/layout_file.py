"""Write a planned layout into the model's layout file, keeping the rest of the file as it is."""

from __future__ import annotations

from pathlib import Path

from superpod.collection import layout_text, registry
from superpod.common import atomic_file, collection
from superpod.errors import UserError
from superpod.nemo2 import planned_job
from superpod.nemo2.build import resilience
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob


def write(model: str, job: PlannedJob, *, folder: Path | None = None) -> Path:
    """Put the job's layout into a layout file of `model`, as its recipe's line for this number of nodes.

    The recipe's other sizes, and other recipes, keep their layouts: one that shared its table gets a table of its own.
    The file is the one that declares the recipe, else the first collection's, else ours; `folder` takes their place.

    Raises:
        UserError: when the model has no recipes, the GPUs are no whole nodes, or the file cannot be written.
    """
    if model not in registry.models():
        raise UserError(f"{model} has no recipes, so there is no file for its layouts", "plan it without --write")
    if job.gpus % job.node.gpus:
        raise UserError(f"{job.gpus} GPUs are no whole nodes of {job.node.gpus}")
    suffix, nodes = _suffix(job), job.gpus // job.node.gpus
    path = folder / f"{model}.toml" if folder else _file_of(model, suffix)
    try:
        old, size = path.read_text() if path.exists() else "", (nodes, job.layout, save_every(job))
        text = with_layout(old, str(path), suffix, size)
        if not folder:
            path.parent.mkdir(exist_ok=True)  # a collection need not have layouts yet
        atomic_file.write(path, text)
    except OSError as broken:
        raise UserError(f"{path} cannot be written: {broken.strerror}") from broken
    return path


def _file_of(model: str, suffix: str) -> Path:
    declaring = [path for path in registry.layout_files(model) if suffix in layout_text.places(path)]
    own = [folder / "layouts" / f"{model}.toml" for folder in collection.folders()]
    return [*declaring, *own, registry.LAYOUTS / f"{model}.toml"][0]


def _suffix(job: PlannedJob) -> str:
    """The recipe's name without its model."""
    usual = registry.sequence(registry.models()[job.model.name], job.task)
    prefix = "" if job.seq == usual else f"{job.seq // 1024}k_"
    suffix = f"{prefix}{job.task}_{job.node.gpu.name}_{job.precision}"
    try:
        registry.recipe_facts(suffix, "")
    except UserError as wrong:
        raise UserError(f"no recipe can be called {suffix}", wrong.hint) from wrong
    return suffix


Size = tuple[int, Layout, int]
"""Nodes, layout there, and steps between two checkpoints."""


def save_every(job: PlannedJob) -> int:
    """Steps between two checkpoints of the recipe that the job becomes: with the options that recipes have."""
    options = planned_job.decided(job.task, job.precision, job.layout.sharding, job.model)
    return resilience.planned(planned_job.settled(job.replace(options=options)))


def with_layout(text: str, where: str, suffix: str, size: Size) -> str:
    """A layout file's text, in which the recipe has a table of its own with this size.

    Raises:
        UserError: opened by `where`, when the recipe's table is not in the form that `layout_text` writes.
    """
    groups = layout_text.parse(text, where)
    at = next((index for index, group in enumerate(groups) if suffix in group.recipes), None)
    nodes, layout, save_every = size
    if at is None:
        return _appended(text, suffix, {nodes: layout}, {nodes: save_every})
    group, place, lines = groups[at], layout_text.tables(text)[at], text.splitlines()
    if set(place.nodes) != set(group.layouts):
        hint = "write each size as nodes.4 = { tp = 2, gbs = 512 }"
        raise UserError(f"{group.where}: a size of {suffix} is not on a line of its own", hint)
    if group.recipes == (suffix,):
        return "\n".join(_with_size(lines, place, size)) + "\n"
    others = [name for name in group.recipes if name != suffix]
    start = next(n for n in range(place.header, len(lines)) if lines[n].lstrip().startswith("recipes"))
    end = next(n for n in range(start, len(lines)) if "]" in lines[n])
    lines[start : end + 1] = layout_text.recipe_lines(others)
    sizes, saves = group.layouts | {nodes: layout}, group.saves | {nodes: save_every}
    return _appended("\n".join(lines), suffix, sizes, saves)


def _appended(text: str, suffix: str, sizes: dict[int, Layout], saves: dict[int, int]) -> str:
    return (f"{text.rstrip()}\n\n" if text.strip() else "") + layout_text.group_text([suffix], sizes, saves)


def _with_size(lines: list[str], place: layout_text.Place, size: Size) -> list[str]:
    """The lines with this size's line replaced, or added where it belongs by its number of nodes."""
    nodes, layout, save_every = size
    line = layout_text.size_line(nodes, layout, save_every)
    if number := place.nodes.get(nodes):
        comment = lines[number - 1].rpartition("}")[2]
        return [*lines[: number - 1], line + comment, *lines[number:]]
    smaller = [number for size, number in place.nodes.items() if size < nodes]
    above = max(smaller, default=min(place.nodes.values()) - 1)
    return [*lines[:above], line, *lines[above:]]
