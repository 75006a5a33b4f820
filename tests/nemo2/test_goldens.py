"""Compare every setting of every recipe with the goldens; see golden_text.py."""

import pytest

from tests.nemo2 import golden_text

COMPLETE = golden_text.complete()


@pytest.mark.nemo
@pytest.mark.parametrize("name", COMPLETE)
def test_a_complete_recipe_equals_its_golden(name, described, golden):
    golden(f"recipes/complete/{name}.txt", golden_text.complete_text(described, COMPLETE[name]))


@pytest.mark.nemo
def test_settings_of_models(described, golden):
    golden("recipes/models.txt", golden_text.models_text(described))


@pytest.mark.nemo
@pytest.mark.long
def test_settings_of_variants(all_described, golden):
    golden("recipes/variants.txt", golden_text.variants_text(all_described))


def test_complete_goldens_belong_to_recipes(request):
    folder = request.config.rootpath / "tests" / "goldens" / "recipes" / "complete"
    assert {path.stem for path in folder.iterdir()} == set(COMPLETE)


def test_every_family_has_a_complete_golden():
    families = {recipe.model.family for recipe in golden_text.firsts().values()}
    assert {recipe.model.family for recipe in COMPLETE.values()} == families
    assert 15 <= len(COMPLETE) <= 25


def test_changes_leave_out_layout_fields():
    first = {"model.config.a": "1", "model.config.b": "2", "trainer.num_nodes": "1", "peft": "None"}
    other = {"model.config.a": "3", "trainer.num_nodes": "2", "peft": "None", "optim.lr": "4"}
    assert golden_text.changes(first, other) == "model.config: a = 3; b is not set\noptim: lr = 4\n"
