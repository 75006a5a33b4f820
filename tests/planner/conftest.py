"""Runs that the planner's tests start from."""

import pytest

from superpod.planner import hardware, models
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob


@pytest.fixture
def run():
    """A job by the names of its model and GPU; `layout` holds fields of `Layout`."""

    def make(model="llama3_8b", gpu="h100", gpus=64, seq=8192, gbs=512, precision="bf16", **layout) -> PlannedJob:
        node = hardware.node(gpu)
        shape = models.find(model) if isinstance(model, str) else model
        fabric = hardware.builtin().fabric_of(node)
        return PlannedJob(shape, node, fabric, gpus, seq, precision, Layout(gbs=gbs, **layout))

    return make
