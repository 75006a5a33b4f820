"""Test the grouping of sizes into shapes, and which of them are recorded as tested."""

import json

import pytest

from superpod.collection import registry
from superpod.collection.facts import proof_level
from superpod.rehearsal.on_gpu import tested
from superpod.rehearsal.on_gpu.case import Case
from superpod.rehearsal.on_gpu.shapes import Shape, find_shapes

NAME = "llama32_1b_pretrain_h100_bf16"


def found(*words, gpu="h100"):
    names = [name for name in registry.recipes() if all(word in name for word in words)]
    return find_shapes([registry.find(name) for name in names], gpu)


def test_sizes_with_the_same_job_on_a_rank_are_tested_once():
    shapes = found("llama32_1b_pretrain").shapes
    every = [size for shape in shapes for size in shape.sizes]
    assert len(every) == len(set(every))
    assert len(shapes) < len(every)
    assert all((shape.case.recipe, shape.case.nodes) == shape.sizes[0] for shape in shapes)
    assert all("h100" in name or "h200" in name for name, _ in every)  # the same compute capability


def test_first_shapes_are_of_different_models():
    shapes = found("_h100_bf16").shapes
    first = [registry.find(shape.case.recipe).model.name for shape in shapes]
    models = set(first)
    assert set(first[: len(models)]) == models


def test_lists_sizes_that_cannot_be_tested():
    shapes = found("mamba2_8b_pretrain_h100")
    assert shapes.shapes == ()
    assert {name for name, _, _ in shapes.skipped} >= {"mamba2_8b_pretrain_h100_bf16"}


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ({"losses": [3.0, 2.0, 1.0]}, ""),
        ({"losses": [3.0, None, 1.0]}, "the loss is not finite"),
        ({"losses": [3.0]}, "only 1 of 3 steps were trained"),
        ({}, "only 0 of 3 steps were trained"),
        ({"error": "RuntimeError: no kernel\nmore", "losses": [3.0, 2.0, 1.0]}, "RuntimeError: no kernel"),
    ],
)
def test_find_problem(result, problem):
    assert tested.find_problem({"case": {"steps": 3}} | result) == problem


def test_records_every_size_of_a_passed_shape_and_forgets_failed_ones(tmp_path):
    path = tmp_path / "tested.json"
    nodes = registry.find(NAME).nodes
    shape = Shape(Case(NAME, nodes=nodes[0]), tuple((NAME, n) for n in nodes), 1.0)
    case = {"recipe": NAME, "nodes": nodes[0], "steps": 3}
    result = {"case": case, "losses": [3.0, 2.0, 1.0], "versions": {"torch": "2.11.0"}}
    assert tested.save([result], [shape], "h200", path) == len(nodes)
    [group] = json.loads(path.read_text())["tests"]
    assert (group["gpu"], group["versions"]) == ("h200", {"torch": "2.11.0"})
    assert group["sizes"][NAME] == {str(n): proof_level.facts(registry.find(NAME), n) for n in nodes}
    assert tested.save([], [shape], "h200", path) == len(nodes)
    newer = result | {"versions": {"torch": "2.12.0"}}
    assert tested.save([newer], [shape], "h200", path) == len(nodes)
    assert [group["versions"]["torch"] for group in json.loads(path.read_text())["tests"]] == ["2.12.0"]
    assert tested.save([result | {"error": "RuntimeError: x"}], [shape], "h200", path) == 0
