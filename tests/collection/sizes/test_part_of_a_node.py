"""Test recipes on a part of a node: one, two or four GPUs."""

import pytest

from superpod.collection.registry import find
from superpod.collection.sizes import sized
from superpod.collection.sizes.sized import Size
from superpod.errors import UserError
from superpod.requests.request import Request

LORA, TRAINED = "llama3_8b_lora_h100_bf16", "llama3_8b_pretrain_h100_bf16"


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_plans_part_of_a_node(gpus):
    nodes, per_node = sized.split_gpus(find(LORA), gpus, None)
    request = Request(LORA, num_nodes=nodes, gpus_per_node=per_node)
    recipe = request.sized_recipe()
    assert (recipe.gpus_per_node, recipe.nodes) == (gpus, (1,))
    job = request.job()
    assert job.gpus == gpus
    assert job.layout.model_parallel <= gpus
    assert recipe.layout().gbs == find(LORA).layout().gbs
    assert any(f"{gpus} of the 8 GPUs of a node: planned now" in note for note in request.notes())


def test_request_and_run_keep_gpus_per_node():
    request = Request(LORA, num_nodes=1, gpus_per_node=1).with_resolved_size()
    again = Request.from_facts(LORA, request.facts())
    assert again == request
    assert (again.gpus_per_node, again.job().gpus) == (1, 1)


def test_refuses_size_that_does_not_fit():
    with pytest.raises(UserError, match=r"no legal layout of llama3_8b_pretrain_h100_bf16 fits 1 node of 1 GPU"):
        sized.find_sized(TRAINED, Size(1, gpus_per_node=1))


def test_all_gpus_of_a_node_is_the_declared_size():
    assert sized.find_sized(LORA, Size(1, gpus_per_node=8)) is find(LORA)


@pytest.mark.parametrize(
    ("gpus", "nodes", "given"),
    [(1, None, (1, 1)), (4, 1, (1, 4)), (8, None, (1, None)), (16, None, (2, None)), (16, 2, (2, None))],
)
def test_splits_gpus_into_nodes(gpus, nodes, given):
    assert sized.split_gpus(find(LORA), gpus, nodes) == given


@pytest.mark.parametrize(("gpus", "nodes"), [(0, None), (-1, None), (12, None), (16, 1), (4, 2)])
def test_refuses_gpus_that_do_not_fill_nodes(gpus, nodes):
    with pytest.raises(UserError, match=r"GPUs|gpus"):
        sized.split_gpus(find(LORA), gpus, nodes)


def test_refuses_parts_of_several_nodes():
    with pytest.raises(UserError, match="are not a part of one node"):
        sized.find_sized(LORA, Size(2, gpus_per_node=4))
