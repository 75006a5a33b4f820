"""Write a planned layout into the model's layout file, keeping the rest of the file as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from superpod.collection import layout_text, recipe_job, registry, save_interval
from superpod.common import atomic_file, collection
from superpod.errors import UserError
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob


def write(model: str, job: PlannedJob, *, folder: Path | None = None) -> Path:
    """Put the job's layout into a layout file of `model`, as its recipe's layout at this number of nodes.

    The recipe's other sizes, and other recipes, keep their layouts. A file of the earlier form is rewritten in today's.
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
        old = path.read_text() if path.exists() else ""
        text = with_size(in_todays_form(old, str(path)), str(path), suffix, nodes, job.layout, save_every(job))
        if not folder:
            path.parent.mkdir(exist_ok=True)  # a collection need not have layouts yet
        atomic_file.write(path, text)
    except OSError as broken:
        raise UserError(f"{path} cannot be written: {broken.strerror}") from broken
    return path


def _file_of(model: str, suffix: str) -> Path:
    files = registry.layout_files(model)
    declaring = [path for path in files if suffix in {entry.recipe for entry in layout_text.read(path)}]
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


def save_every(job: PlannedJob) -> int:
    """Steps between two checkpoints of the recipe that the job becomes: with the options that recipes have."""
    options = recipe_job.decided(job.task, job.precision, job.layout.sharding, job.model)
    return save_interval.planned(recipe_job.settled(job.replace(options=options)))


def with_size(text: str, file: str, suffix: str, nodes: int, layout: Layout, save_every: int) -> str:
    """A layout file's text in which the recipe has this layout at this size. Raises as `with_recipe`."""
    entry = next((entry for entry in layout_text.parse(text, file) if entry.recipe == suffix), None)
    layouts, saves = {nodes: layout}, {nodes: save_every}
    if entry:
        layouts, saves = entry.layouts | layouts, entry.saves | saves
    return with_recipe(text, file, suffix, layouts, saves)


def with_recipe(text: str, file: str, suffix: str, layouts: Mapping[int, Layout], saves: Mapping[int, int]) -> str:
    """A layout file's text in which the recipe has these layouts, where its lines were or after all others.

    Comments behind the lines that are replaced move above them.

    Raises:
        UserError: opened by `file`, when the file has the recipe in a section of its own.
    """
    entry = next((entry for entry in layout_text.parse(text, file) if entry.recipe == suffix), None)
    lines = text.splitlines()
    section = next((n for n, line in enumerate(lines) if line.lstrip().startswith("[")), len(lines))
    own = [n for n in range(section) if (layout_text.key_of(lines[n]) or ("",))[0] == suffix]
    if entry and not own:
        raise UserError(f"{entry.where}: {suffix} has a section", f"write it on a line: {layout_text.EXAMPLE}")
    comments = [f"# {comment}" for n in own if (comment := lines[n].partition("#")[2].strip())]
    new = [*comments, *layout_text.entry_lines(suffix, layouts, saves, entry.facts if entry else None)]
    at = own[0] if own else _above_comments(lines, section)
    before = [line for n, line in enumerate(lines[:at]) if n not in own]
    after = [line for n, line in enumerate(lines[at:], start=at) if n not in own]
    return "\n".join([*before, *new, *after]) + "\n"


def in_todays_form(text: str, file: str) -> str:
    """A layout file's text, with a line for each recipe in place of the `[[layouts]]` tables of the earlier form.

    Comments are kept, those within a table above its recipes.
    """
    found = layout_text.earlier_places(text)
    if not found:
        return text
    lines, entries = text.splitlines(), layout_text.parse(text, file)
    starts = [_above_comments(lines, place.line - 1) for place in found]
    written = lines[: starts[0]]
    for place, start, end in zip(found, starts, [*starts[1:], len(lines)], strict=True):
        written += [f"# {comment}" for line in lines[start:end] if (comment := line.partition("#")[2].strip())]
        for entry in entries:
            if entry.line == place.line:
                written += layout_text.entry_lines(entry.recipe, entry.layouts, entry.saves, entry.facts)
    return "\n".join(written) + "\n"


def _above_comments(lines: Sequence[str], at: int) -> int:
    """Where the comments start that stand directly above a line."""
    while at and lines[at - 1].startswith("#"):
        at -= 1
    return at
