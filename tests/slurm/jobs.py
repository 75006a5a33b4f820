"""Planned jobs, and scripts with a modified recipe."""

import hashlib
import re
from dataclasses import replace
from typing import Any

from superpod.planner import hardware, models
from superpod.planner.layout import Layout
from superpod.planner.planned_job import Options, PlannedJob


def planned(
    gpu: str = "h100", precision: str = "bf16", *, options: dict[str, Any] | None = None, **layout: int
) -> PlannedJob:
    """Llama 3 8B on eight GPUs in some layout."""
    facts = hardware.builtin()
    node = facts.node(gpu)
    return PlannedJob(
        model=models.find("llama3_8b"),
        node=node,
        fabric=facts.fabric_of(node),
        gpus=8,
        seq=8192,
        precision=precision,
        layout=replace(Layout(gbs=8), **layout),
        options=replace(Options(), **options or {}),
    )


def edited(script: str, old: str, new: str) -> str:
    """A batch script with other text in the recipe that it carries, and the checksum of that."""
    head, mark, carried = script.partition("\n#>> ")
    recipe, end, rest = (mark.lstrip("\n") + carried).partition("\n#<<\n")
    assert old in recipe
    carried = recipe.replace(old, new) + end + rest
    digest = hashlib.sha256(carried.encode()).hexdigest()
    return re.sub(r"(?<=sha256sum\) == )[0-9a-f]{64}", digest, head, count=1) + "\n" + carried
