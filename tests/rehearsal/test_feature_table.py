"""A recipe of every shape, rehearsed: its own layout in small, on four to eight ranks, compared with one rank."""

import json

import pytest

from superpod.rehearsal import feature_table, features
from superpod.rehearsal.features import FEATURES
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
    [pytest.param(shape.key, id=shape.key, marks=QUICK if shape.quick else OTHER) for shape in FEATURES],
    indirect=True,
)
def test_rehearsed(shape):
    assert shape["passed"], shape
    assert shape["ranks"] >= 4
    assert {check["name"] for check in shape["checks"]} >= CHECKS
    assert "its own topology" in shape["topology"] or "folded" in shape["topology"]


def test_there_are_enough_shapes():
    assert len(FEATURES) == len({shape.key for shape in FEATURES}) >= 14
    assert sum(shape.quick for shape in FEATURES) >= 6


@pytest.mark.parametrize("kind", [pytest.param(kind, id=kind.key) for kind in FEATURES])
def test_a_recipe_has_it(kind):
    example = features.find_recipe(kind)
    small = shrink(example.job).job
    assert example.recipe.startswith(kind.recipes)
    assert kind.applies(small.layout, example.job.model)
    assert 4 <= small.gpus <= 8


def test_the_page_has_the_current_table():
    page = feature_table.PAGE.read_text()
    results = json.loads(feature_table.RESULTS.read_text())
    assert feature_table.update_table(page, results) == page, "python -m superpod.rehearsal.feature_table --write"
    assert {shape.key for shape in FEATURES if not results.get(shape.key, {}).get("passed")} == set()
