"""The plan of a run: its plan.json, read back as the job that the planner describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from superpod.common.files import read_json
from superpod.errors import UserError
from superpod.planner import hardware, models
from superpod.planner.layout import Layout
from superpod.planner.planned_job import Options, PlannedJob
from superpod.runtime.runs.run_folder import RunFolder


def planned_job(run: RunFolder) -> PlannedJob:
    """The job of a run's plan.json, on hardware as it is known here.

    Raises:
        UserError: there is no plan, or the planner here does not know what it names.
    """
    plan = read_json(run.path / "plan.json") or {}
    query, layouts = plan.get("query"), plan.get("layouts")
    if not isinstance(query, dict) or not isinstance(layouts, list) or not layouts:
        raise UserError(f"{run.path} has no plan.json", "name a run that `recipes run` or `recipes submit` started")
    try:
        node = hardware.node(query["gpu"])
        return PlannedJob(
            model=models.find(query["model"]),
            node=node,
            fabric=hardware.fabric(query["fabric"]) if query.get("fabric") else hardware.builtin().fabric_of(node),
            gpus=query["gpus"],
            seq=query["seq"],
            precision=query["precision"][0],
            layout=Layout(**_known(Layout, layouts[0]["layout"])),
            task=query.get("task", "pretrain"),
            options=Options(**_known(Options, query.get("options") or {})),
        )
    except (KeyError, TypeError, IndexError) as broken:
        raise UserError(f"{run.path / 'plan.json'} cannot be read: {broken}") from broken


def _known(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a dataclass's fields, lists as the tuples that JSON made them of."""
    names = {field.name for field in fields(kind)}
    return {key: tuple(v) if isinstance(v, list) else v for key, v in values.items() if key in names}
