"""A golden for every recipe: the first of a model and task whole, line by line; the others by what differs from it."""

import pytest

from superpod.collection.registry import recipes
from tests.nemo2.describe import firsts, golden_of

FIRSTS = firsts()


@pytest.mark.nemo
@pytest.mark.parametrize("name", FIRSTS)
def test_the_first_of_a_model_and_task_equals_its_golden(name, described, golden):
    golden(
        f"recipes/whole/{name}.txt", "".join(f"{path} = {value}\n" for path, value in _lines(described, FIRSTS[name]))
    )


@pytest.mark.nemo
@pytest.mark.long
@pytest.mark.parametrize("name", FIRSTS)
def test_the_others_differ_from_it_by_their_golden(name, all_described, golden):
    first = dict(_lines(all_described, FIRSTS[name]))
    alike: dict[str, list[str]] = {}
    for recipe in recipes().values():
        if golden_of(recipe) == name and recipe is not FIRSTS[name]:
            effect = _effect(first, dict(_lines(all_described, recipe)))
            alike.setdefault(effect, []).append(recipe.suffix)
    text = "".join(f"[{' '.join(names)}]\n{effect}\n" for effect, names in alike.items())
    golden(f"recipes/variants/{name}.txt", f"# What differs from {FIRSTS[name].name}\n\n{text}")


@pytest.mark.parametrize("kind", ["whole", "variants"])
def test_goldens_are_those_of_recipes_that_exist(request, kind):
    folder = request.config.rootpath / "tests" / "goldens" / "recipes" / kind
    assert {path.stem for path in folder.iterdir()} == set(FIRSTS)


def _lines(described, recipe):
    """(path, value) of a recipe; where its own name stands, `{recipe}`."""
    for path, value, _ in described["lines"][recipe.name]:
        yield path, value.replace(repr(recipe.name), "{recipe}")


def _effect(first, other):
    """A line for each part of the recipe in which something differs."""
    parts: dict[str, list[str]] = {}
    for path in sorted({*first, *other}):
        if first.get(path) != other.get(path):
            part, _, name = path.rpartition(".")
            parts.setdefault(part, []).append(f"{name} = {other[path]}" if path in other else f"{name} is not set")
    return "".join(f"{part}: {'; '.join(changes)}\n" for part, changes in parts.items())
