"""Write a planned layout to the layout file of its model, without other changes to the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from superpod.collection import layout_text, recipe_job, registry, save_interval
from superpod.common import atomic_file, collection
from superpod.errors import UserError
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob


def write_layout(model: str, job: PlannedJob, *, folder: Path | None = None) -> Path:
    """Write the layout of a job to a layout file of `model`, and return the file.

    The layouts of other sizes and recipes are kept. A file in the old format is converted. The file is the one that
    declares the recipe, else that of the first user collection, else the built-in one; with `folder`, it is in that
    folder.

    Raises:
        UserError: the model has no recipes, the GPUs do not fill their nodes, or the file cannot be written.
    """
    if model not in registry.models():
        raise UserError(f"{model} has no recipes, so it has no layout file", "omit --write")
    if job.gpus % job.node.gpus:
        raise UserError(f"{job.gpus} GPUs are not a multiple of the {job.node.gpus} GPUs per node")
    suffix, nodes = _build_recipe_suffix(job), job.gpus // job.node.gpus
    path = folder / f"{model}.toml" if folder else _choose_file(model, suffix)
    try:
        old_text = path.read_text() if path.exists() else ""
        text = add_size(
            convert_old_format(old_text, str(path)), str(path), suffix, nodes, job.layout, compute_save_every(job)
        )
        if not folder:
            path.parent.mkdir(exist_ok=True)  # a collection may not have a layouts folder yet
        atomic_file.write(path, text)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    return path


def _choose_file(model: str, suffix: str) -> Path:
    """Return the layout file that declares the recipe `suffix`, or else the file for new recipes of the model."""
    for path in registry.layout_files(model):
        if suffix in {entry.recipe for entry in layout_text.read(path)}:
            return path
    user_files = [folder / "layouts" / f"{model}.toml" for folder in collection.folders()]
    return [*user_files, registry.LAYOUTS / f"{model}.toml"][0]


def _build_recipe_suffix(job: PlannedJob) -> str:
    """Return the name of the job's recipe without its model. Raises UserError if it would be invalid."""
    default = registry.sequence(registry.models()[job.model.name], job.task)
    prefix = "" if job.seq == default else f"{job.seq // 1024}k_"
    suffix = f"{prefix}{job.task}_{job.node.gpu.name}_{job.precision}"
    try:
        registry.recipe_facts(suffix, "")
    except UserError as error:
        raise UserError(f"{suffix} is not a valid recipe name", error.hint) from error
    return suffix


def compute_save_every(job: PlannedJob) -> int:
    """Return the steps between two checkpoints for a job with the default options of recipes."""
    options = recipe_job.default_options(job.task, job.precision, job.layout.sharding, job.model)
    return save_interval.plan_interval(recipe_job.resolve_parameters(job.replace(options=options)))


def add_size(text: str, file: str, suffix: str, nodes: int, layout: Layout, save_every: int) -> str:
    """Return the text of a layout file with a layout of recipe `suffix` on `nodes` nodes added or replaced.

    Raises UserError like `replace_recipe`.
    """
    entry = next((entry for entry in layout_text.parse(text, file) if entry.recipe == suffix), None)
    layouts, saves = {nodes: layout}, {nodes: save_every}
    if entry:
        layouts, saves = entry.layouts | layouts, entry.saves | saves
    return replace_recipe(text, file, suffix, layouts, saves)


def replace_recipe(text: str, file: str, suffix: str, layouts: Mapping[int, Layout], saves: Mapping[int, int]) -> str:
    """Return the text of a layout file with the given layouts of recipe `suffix`.

    They replace the lines of the recipe, or are added after all other recipes. Comments at the end of replaced lines
    are moved above them.

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
    comments = _extract_comments([lines[n] for n in replaced_lines])
    new_lines = [*comments, *layout_text.format_entry(suffix, layouts, saves, entry.facts if entry else None)]
    insert_at = replaced_lines[0] if replaced_lines else _find_comment_start(lines, first_section)
    lines_before = [line for n, line in enumerate(lines[:insert_at]) if n not in replaced_lines]
    lines_after = [line for n, line in enumerate(lines[insert_at:], start=insert_at) if n not in replaced_lines]
    return "\n".join([*lines_before, *new_lines, *lines_after]) + "\n"


def _extract_comments(lines: Sequence[str]) -> list[str]:
    """Return the comments in lines, each as a line of its own."""
    texts = [line.partition("#")[2].strip() for line in lines]
    return [f"# {text}" for text in texts if text]


def convert_old_format(text: str, file: str) -> str:
    """Return the text of a layout file with `[[layouts]]` tables of the old format converted to lines.

    Comments inside a table are moved above its recipes.
    """
    old_tables = layout_text.find_old_tables(text)
    if not old_tables:
        return text
    lines, entries = text.splitlines(), layout_text.parse(text, file)
    starts = [_find_comment_start(lines, place.line - 1) for place in old_tables]
    new_text = lines[: starts[0]]
    for place, start, end in zip(old_tables, starts, [*starts[1:], len(lines)], strict=True):
        new_text += _extract_comments(lines[start:end])
        for entry in entries:
            if entry.line == place.line:
                new_text += layout_text.format_entry(entry.recipe, entry.layouts, entry.saves, entry.facts)
    return "\n".join(new_text) + "\n"


def _find_comment_start(lines: Sequence[str], at: int) -> int:
    """Return the index of the first comment line directly above line `at`, or `at` if there is none."""
    while at and lines[at - 1].startswith("#"):
        at -= 1
    return at
