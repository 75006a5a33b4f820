"""Write a planned layout into the layout file of its model; the rest of the file stays unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from superpod.collection import layout_text, recipe_job, registry, save_interval
from superpod.common import atomic_file, collection
from superpod.errors import UserError
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob


def write(model: str, job: PlannedJob, *, folder: Path | None = None) -> Path:
    """Write the job's layout to a layout file of `model`, for the recipe and the number of nodes of the job.

    The layouts of other sizes and recipes are kept. A file in the old format is converted to the current format. The
    layout is written to the file that declares the recipe, else to the first user collection, else to the built-in
    file. If `folder` is given, the file is in that folder instead.

    Raises:
        UserError: the model has no recipes, the GPUs are not a whole number of nodes, or the file cannot be written.
    """
    if model not in registry.models():
        raise UserError(f"{model} has no recipes, so it has no layout file", "plan it without --write")
    if job.gpus % job.node.gpus:
        raise UserError(f"{job.gpus} GPUs are not a whole number of nodes with {job.node.gpus} GPUs each")
    suffix, nodes = _recipe_suffix(job), job.gpus // job.node.gpus
    path = folder / f"{model}.toml" if folder else _choose_file(model, suffix)
    try:
        old_text = path.read_text() if path.exists() else ""
        text = with_size(to_current_format(old_text, str(path)), str(path), suffix, nodes, job.layout, save_every(job))
        if not folder:
            path.parent.mkdir(exist_ok=True)  # a collection may not have a layouts folder yet
        atomic_file.write(path, text)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    return path


def _choose_file(model: str, suffix: str) -> Path:
    for path in registry.layout_files(model):
        if suffix in {entry.recipe for entry in layout_text.read(path)}:
            return path
    user_files = [folder / "layouts" / f"{model}.toml" for folder in collection.folders()]
    return [*user_files, registry.LAYOUTS / f"{model}.toml"][0]


def _recipe_suffix(job: PlannedJob) -> str:
    """Return the name of the job's recipe without its model."""
    default = registry.sequence(registry.models()[job.model.name], job.task)
    prefix = "" if job.seq == default else f"{job.seq // 1024}k_"
    suffix = f"{prefix}{job.task}_{job.node.gpu.name}_{job.precision}"
    try:
        registry.recipe_facts(suffix, "")
    except UserError as error:
        raise UserError(f"{suffix} is not a valid recipe name", error.hint) from error
    return suffix


def save_every(job: PlannedJob) -> int:
    """Return the number of steps between two checkpoints for the job's recipe, with the default options of recipes."""
    options = recipe_job.default_options(job.task, job.precision, job.layout.sharding, job.model)
    return save_interval.planned_interval(recipe_job.resolve_parameters(job.replace(options=options)))


def with_size(text: str, file: str, suffix: str, nodes: int, layout: Layout, save_every: int) -> str:
    """Return the text of a layout file with this layout added. Raises the same errors as `with_recipe`."""
    entry = next((entry for entry in layout_text.parse(text, file) if entry.recipe == suffix), None)
    layouts, saves = {nodes: layout}, {nodes: save_every}
    if entry:
        layouts, saves = entry.layouts | layouts, entry.saves | saves
    return with_recipe(text, file, suffix, layouts, saves)


def with_recipe(text: str, file: str, suffix: str, layouts: Mapping[int, Layout], saves: Mapping[int, int]) -> str:
    """Return the text of a layout file, with these layouts for the recipe.

    They replace the recipe's lines, or are added after all other recipes. Comments at the end of replaced lines are
    moved above them.

    Raises:
        UserError: the file declares the recipe as a TOML table; the message begins with `file`.
    """
    entry = next((entry for entry in layout_text.parse(text, file) if entry.recipe == suffix), None)
    lines = text.splitlines()
    first_section = next((n for n, line in enumerate(lines) if line.lstrip().startswith("[")), len(lines))
    replaced_lines = [n for n in range(first_section) if (layout_text.parse_key(lines[n]) or ("",))[0] == suffix]
    if entry and not replaced_lines:
        message = f"{entry.where}: {suffix} is a TOML table, which cannot be updated"
        raise UserError(message, f"write it on one line: {layout_text.EXAMPLE}")
    comments = _comments([lines[n] for n in replaced_lines])
    new_lines = [*comments, *layout_text.entry_lines(suffix, layouts, saves, entry.facts if entry else None)]
    insert_at = replaced_lines[0] if replaced_lines else _start_of_comments(lines, first_section)
    lines_before = [line for n, line in enumerate(lines[:insert_at]) if n not in replaced_lines]
    lines_after = [line for n, line in enumerate(lines[insert_at:], start=insert_at) if n not in replaced_lines]
    return "\n".join([*lines_before, *new_lines, *lines_after]) + "\n"


def _comments(lines: Sequence[str]) -> list[str]:
    """Return the comments in `lines`, one line each."""
    texts = [line.partition("#")[2].strip() for line in lines]
    return [f"# {text}" for text in texts if text]


def to_current_format(text: str, file: str) -> str:
    """Convert the `[[layouts]]` tables of the old format to one line per recipe.

    Comments are kept; those inside a table are moved above its recipes.
    """
    old_places = layout_text.old_places(text)
    if not old_places:
        return text
    lines, entries = text.splitlines(), layout_text.parse(text, file)
    starts = [_start_of_comments(lines, place.line - 1) for place in old_places]
    new_text = lines[: starts[0]]
    for place, start, end in zip(old_places, starts, [*starts[1:], len(lines)], strict=True):
        new_text += _comments(lines[start:end])
        for entry in entries:
            if entry.line == place.line:
                new_text += layout_text.entry_lines(entry.recipe, entry.layouts, entry.saves, entry.facts)
    return "\n".join(new_text) + "\n"


def _start_of_comments(lines: Sequence[str], at: int) -> int:
    """Return the index of the first line of the comment directly above line `at`, or `at` if there is none."""
    while at and lines[at - 1].startswith("#"):
        at -= 1
    return at
