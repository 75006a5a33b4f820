"""A recipe of every shape, rehearsed: its own layout in small, on four to eight ranks, compared with one rank."""

import json

import pytest

from superpod.rehearsal import table
from superpod.rehearsal.proof import shapes
from superpod.rehearsal.proof.shapes import SHAPES
from superpod.rehearsal.training.shrink import shrink

CHECKS = {
    "saved",
    "loss falls",
    "one rank's losses, fp32",
    "one rank's gradient norms, fp32",
    "data",
    "layers",
    "every rank took part",
    "replicas agree",
    "resumed",
    "resharded to one rank",
}


QUICK, OTHER = pytest.mark.slow, pytest.mark.long


@pytest.mark.nemo
@pytest.mark.train
@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape.key, id=shape.key, marks=QUICK if shape.quick else OTHER) for shape in SHAPES],
    indirect=True,
)
def test_rehearsed(shape):
    assert shape["passed"], shape
    assert shape["ranks"] >= 4
    assert {check["name"] for check in shape["checks"]} >= CHECKS
    assert "its own topology" in shape["topology"] or "folded" in shape["topology"]


def test_there_are_enough_shapes():
    assert len(SHAPES) == len({shape.key for shape in SHAPES}) >= 14
    assert sum(shape.quick for shape in SHAPES) >= 6


@pytest.mark.parametrize("kind", [pytest.param(kind, id=kind.key) for kind in SHAPES])
def test_a_recipe_has_it(kind):
    example = shapes.find(kind)
    small = shrink(example.job).job
    assert example.recipe.startswith(kind.recipes)
    assert kind.has(small.layout, example.job.model)
    assert 4 <= small.gpus <= 8


def test_the_page_has_the_current_table():
    page = table.PAGE.read_text()
    results = json.loads(table.RESULTS.read_text())
    assert table.with_table(page, results) == page, "python -m superpod.rehearsal.table --write"
    assert {shape.key for shape in SHAPES if not results.get(shape.key, {}).get("passed")} == set()
