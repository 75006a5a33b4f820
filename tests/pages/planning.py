"""Jobs and searches for the tests of pages."""

from functools import cache

from superpod.planner import hardware, models, plans
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob


def job(model="llama3_8b", gpus=64, gbs=128, gpu="h100", seq=8192, **layout) -> PlannedJob:
    node = hardware.node(gpu)
    fabric = hardware.builtin().fabric_of(node)
    return PlannedJob(models.find(model), node, fabric, gpus, seq, "bf16", Layout(gbs=gbs, **layout))


@cache
def search(model="llama3_8b", gpus=16, gbs=64, gpu="h100"):
    return plans.search(job(model, gpus, gbs, gpu))
