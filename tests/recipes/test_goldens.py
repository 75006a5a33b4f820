"""A recipe's golden is the whole of it: every line, so that a reviewer sees every effect of a change."""

import pytest

from superpod.recipes.registry import recipes

pytestmark = pytest.mark.nemo


@pytest.mark.parametrize("name", recipes())
def test_recipe_equals_its_golden(name, described, golden):
    golden(f"recipes/{name}.txt", "".join(f"{path} = {value}\n" for path, value, _ in described["lines"][name]))


def test_goldens_are_those_of_recipes_that_exist(request):
    folder = request.config.rootpath / "tests" / "goldens" / "recipes"
    assert {path.stem for path in folder.iterdir()} == set(recipes())
