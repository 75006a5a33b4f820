"""Where a job was submitted without NeMo, its ranks build the configuration here, and compare it with the plan."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.common import collection
from superpod.errors import UserError
from superpod.requests import planned_run
from superpod.requests.request import Request
from superpod.requests.resolve import BuiltRun, resolve

if TYPE_CHECKING:
    import nemo_run as run


def build(request: Mapping[str, Any], planned: Mapping[str, Any]) -> run.Partial:
    """The recipe that was asked for, as every rank of the job builds it; rank 0 keeps its lines in the run folder.

    Ends the process, before it joins the others, where the recipe breaks a rule or is not what was `planned`: the
    nodes, the time limit and the memory were chosen for that.
    """
    os.environ.pop(collection.VARIABLE, None)  # the job carries what it needs, and the folder may not be here
    try:
        built = resolve(Request.of_facts(request["recipe"], request), request["data_facts"])
    except UserError as wrong:
        sys.exit(f"refused: {wrong}" + (f"\n  next: {wrong.hint}" if wrong.hint else ""))
    if differences := unlike(planned, planned_run.what_was_planned(built)):
        sys.exit(f"refused: built on this node, it is not the run that was planned: {'; '.join(differences)}")
    _keep_lines(built)
    return built.partial


def unlike(planned: Mapping[str, Any], built: Mapping[str, Any], where: str = "") -> list[str]:
    """What differs between two answers of `what_was_planned`, as `layout.tp: 2 planned, 4 built`."""
    lines: list[str] = []
    for name in sorted({*planned, *built}):
        old, new = planned.get(name), built.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += unlike(old, new, f"{where}{name}.")
        elif old != new:
            lines.append(f"{where}{name}: {old} planned, {new} built")
    return lines


def _keep_lines(built: BuiltRun) -> None:
    run_dir = os.environ.get("SUPERPOD_RUN_DIR")
    if run_dir and os.environ.get("RANK") == "0":
        target = Path(run_dir, "recipe.txt")
        fresh = target.with_name(f"recipe.txt.{os.getpid()}")
        fresh.write_text("".join(f"{line}\n" for line in built.lines), encoding="utf-8")
        fresh.replace(target)
