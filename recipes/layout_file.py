"""Write a planned layout into the model's table of recipes, keeping everything else in the file as it is."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from superpod.errors import UserError
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob
from superpod.recipes import registry


def write(model: str, job: PlannedJob, *, folder: Path | None = None) -> Path:
    """Put the job's layout into `{model}.toml` as the table of its task, GPU and precision.

    A table that is there already gets the layout at this number of nodes: as its own when that is its only size,
    else as its line `at.N`. A recipe that another table lays out gets a table of its own.

    Raises:
        UserError: when the model has no recipes, the GPUs are no whole nodes, or the file cannot be written.
    """
    path = (folder or registry.LAYOUTS) / f"{model}.toml"
    if model not in registry.models():
        raise UserError(f"{model} has no recipes, so there is no file for its layouts", "plan it without --write")
    if job.gpus % job.node.gpus:
        raise UserError(f"{job.gpus} GPUs are no whole nodes of {job.node.gpus}")
    import tomlkit  # keeps comments and order

    nodes = job.gpus // job.node.gpus
    try:
        document = tomlkit.parse(path.read_text() if path.exists() else "")
        name = _table(job)
        table = document.get(name)
        _part(document, name)
        if table is None or list(table.get("nodes", [])) == [nodes]:
            document[name] = _whole(tomlkit, nodes, job.layout)
        else:
            _add(tomlkit, table, nodes, job.layout)
        partial = path.with_suffix(".toml.partial")
        partial.write_text(tomlkit.dumps(document))
        os.replace(partial, path)
    except OSError as broken:
        raise UserError(f"{path} cannot be written: {broken.strerror}") from broken
    return path


def _table(job: PlannedJob) -> str:
    trained = registry.models()[job.model.name].seq
    prefix = "" if job.seq == trained else f"{job.seq // 1024}k_"
    name = f"{prefix}{job.task}_{job.node.gpu.name}_{job.precision}"
    if not registry.TABLE.fullmatch(name):
        raise UserError(f"no recipe can be called {name}", "plan for a DGX GPU and a precision that recipes have")
    return name


def _values(layout: Layout) -> dict[str, Any]:
    """What differs from the defaults; gbs always."""
    found = {f.name: getattr(layout, f.name) for f in fields(layout) if getattr(layout, f.name) != f.default}
    found = {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}
    return found | {"gbs": layout.gbs}


def _whole(tomlkit: Any, nodes: int, layout: Layout) -> Any:
    table = tomlkit.table()
    for key, value in ({"nodes": [nodes]} | _values(layout)).items():
        table.add(key, value)
    return table


def _part(document: Any, name: str) -> None:
    """Take a recipe out of the table that lays it out together with others."""
    for table in document.values():
        if name in table.get("also", ()):
            table["also"].remove(name)


def _add(tomlkit: Any, table: Any, nodes: int, layout: Layout) -> None:
    """Another size: its layout whole, but for the global batch where that is the table's, as its `at.N` line."""
    values = _values(layout)
    if values["gbs"] == table.get("gbs"):
        del values["gbs"]
    if nodes not in table["nodes"]:
        table["nodes"] = sorted([*table["nodes"], nodes])
    sizes = table.setdefault("at", tomlkit.table())
    inline = tomlkit.inline_table()
    inline.update(values)
    sizes[str(nodes)] = inline
