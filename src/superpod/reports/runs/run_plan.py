"""Reads the plan of a run (plan.json) as the planner's job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from superpod.common.json_files import read_json
from superpod.errors import UserError
from superpod.planner import hardware, models
from superpod.planner.layout import Layout
from superpod.planner.planned_job import Options, PlannedJob
from superpod.runtime.runs.run_folder import RunFolder


def planned_job(run: RunFolder) -> PlannedJob:
    """Return the planner's job in plan.json of a run. Raises UserError if it is missing or invalid."""
    plan = read_json(run.path / "plan.json") or {}
    query, layouts = plan.get("query"), plan.get("layouts")
    if not isinstance(query, dict) or not isinstance(layouts, list) or not layouts:
        raise UserError(f"{run.path} has no plan.json", "specify a run that `recipes run` or `recipes submit` started")
    try:
        node = hardware.node(query["gpu"])
        return PlannedJob(
            model=models.find(query["model"]),
            node=node,
            fabric=hardware.fabric(query["fabric"]) if query.get("fabric") else hardware.builtin().fabric_of(node),
            gpus=query["gpus"],
            seq=query["seq"],
            precision=query["precision"][0],
            layout=Layout(**_select_known_fields(Layout, layouts[0]["layout"])),
            task=query.get("task", "pretrain"),
            options=Options(**_select_known_fields(Options, query.get("options") or {})),
        )
    except (KeyError, TypeError, IndexError) as error:
        raise UserError(f"{run.path / 'plan.json'} cannot be read: {error}") from error


def _select_known_fields(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are fields of the dataclass `kind`, with lists converted to tuples."""
    names = {field.name for field in fields(kind)}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items() if key in names}
