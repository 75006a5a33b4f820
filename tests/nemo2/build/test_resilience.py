"""What a recipe takes from a prediction is a number in its layout file: it does not move when the planner learns."""

import importlib.util
import sys

import pytest

from superpod.collection import layout_text, registry
from superpod.collection.sizes.sized import Size, sized
from superpod.errors import UserError
from superpod.nemo2.build import resilience
from superpod.planner.timing import steptime
from tests.conftest import ROOT
from tests.run_module import run_module


@pytest.fixture
def doubled(monkeypatch):
    """A planner that expects every step to take twice as long."""
    real = steptime.step

    def twice(*args):
        step = real(*args)
        return steptime.Step(2 * step.seconds, {key: 2 * part for key, part in step.terms.items()})

    monkeypatch.setattr(steptime, "step", twice)


def test_every_declared_size_says_how_often_it_saves():
    assert [r.name for r in registry.recipes().values() if set(r.saves) != set(r.nodes)] == []
    steps = {steps for r in registry.recipes().values() for steps in r.saves.values()}
    assert steps <= set(resilience.CADENCES)
    assert len(steps) > 4


def test_declared_sizes_stay_where_the_planner_expects_twice_the_time(doubled):
    recipes = list(registry.recipes().values())
    assert [resilience.save_every(r, n) for r in recipes for n in r.nodes] == [
        r.saves[n] for r in recipes for n in r.nodes
    ]
    moved = [r for r in recipes[::40] if resilience.planned(resilience.job(r)) != r.saves[r.nodes[0]]]
    assert len(moved) > 20  # so the planner has moved


def test_a_size_that_is_planned_on_the_spot_is_computed(doubled):
    recipe = registry.find("llama3_8b_pretrain_h100_bf16")
    assert sized(recipe, Size(num_nodes=recipe.nodes[0])).saves == recipe.saves
    for other in (Size(num_nodes=3, gbs=480), Size(num_nodes=2, gbs=256), Size(num_nodes=2, seq=4096)):
        changed = sized(recipe, other)
        assert changed.saves == {}
        (nodes,) = changed.nodes
        assert resilience.save_every(changed, nodes) == resilience.planned(resilience.job(changed, nodes))


@pytest.mark.nemo
@pytest.mark.slow
def test_built_recipes_stay_where_the_planner_expects_twice_the_time():
    run_module("tests.nemo2.doubled")


@pytest.mark.parametrize("value", ["0", "-5", "1.5", "true", '"10"', "10000000"])
def test_steps_that_cannot_be_are_named_with_their_line(value):
    text = f'[[layouts]]\nrecipes = ["pretrain_h100_bf16"]\nnodes.1 = {{ gbs = 8, save_every = {value} }}\n'
    with pytest.raises(UserError, match=r"a\.toml:3: save_every is"):
        layout_text.parse(text, "a.toml")


def test_recipes_of_a_table_that_save_at_other_steps_get_tables_of_their_own():
    text = (
        '# Head.\n\n# of a and b\n[[layouts]]\nrecipes = ["a", "b", "c"]\nnodes.1 = { tp = 2, gbs = 8 }  # rack\n'
        'nodes.2 = { gbs = 8, save_every = 7 }\n\n[[layouts]]\nrecipes = ["d"]\nnodes.1 = { gbs = 9 }\n'
    )
    saves = {"a": {1: 10, 2: 20}, "b": {1: 10, 2: 20}, "c": {1: 50, 2: 20}, "d": {1: 5}}
    after = script("save_intervals").with_saves(text, saves)
    assert after == (
        '# Head.\n\n# of a and b\n[[layouts]]\nrecipes = ["a", "b"]\n'
        "nodes.1 = { tp = 2, gbs = 8, save_every = 10 }  # rack\nnodes.2 = { gbs = 8, save_every = 20 }\n\n"
        '[[layouts]]\nrecipes = ["c"]\nnodes.1 = { tp = 2, gbs = 8, save_every = 50 }\n'
        "nodes.2 = { gbs = 8, save_every = 20 }\n\n"
        '[[layouts]]\nrecipes = ["d"]\nnodes.1 = { gbs = 9, save_every = 5 }\n'
    )
    read = {name: group.saves for group in layout_text.parse(after, "x") for name in group.recipes}
    assert read == saves


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
