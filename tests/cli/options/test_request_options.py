"""Requests of command lines, before NeMo is imported."""

import pytest

from superpod.cli.options.request_options import make_request
from superpod.cli.options.size_options import SizeOptions
from superpod.collection.sizes.sized import SizedRecipe

NAME = "llama3_8b_pretrain_h100_bf16"


@pytest.mark.parametrize(
    ("size", "by"), [(SizeOptions(nodes=16), "planned now"), (SizeOptions(nodes=2, layout="tp=4"), "command line")]
)
def test_a_shown_recipe_keeps_the_origin_of_its_layout(size, by):
    recipe = make_request(NAME, [], None, size, to_run=False).sized_recipe()
    assert isinstance(recipe, SizedRecipe)
    assert recipe.set_by["tp"] == by


def test_a_recipe_to_run_gets_its_layout():
    request = make_request(NAME, [], None, SizeOptions(nodes=16))
    assert request.layout
    assert request.with_resolved_size() == request
