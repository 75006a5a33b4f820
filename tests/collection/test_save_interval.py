"""Test that declared save intervals do not depend on the planner."""

import importlib.util
import sys

import pytest

from superpod.collection import layout_text, recipe_job, registry, save_interval
from superpod.collection.sizes.sized import Size, adapt
from superpod.errors import UserError
from superpod.planner.timing import steptime
from tests.conftest import ROOT
from tests.run_module import run_module


@pytest.fixture
def doubled(monkeypatch):
    """Double all predicted step times."""
    real = steptime.step

    def twice(*args):
        step = real(*args)
        return steptime.Step(2 * step.seconds, {key: 2 * part for key, part in step.terms.items()})

    monkeypatch.setattr(steptime, "step", twice)


def test_every_declared_size_has_a_save_interval():
    assert [r.name for r in registry.recipes().values() if set(r.saves) != set(r.nodes)] == []
    steps = {steps for r in registry.recipes().values() for steps in r.saves.values()}
    assert steps <= set(save_interval.INTERVALS)
    assert len(steps) > 4


def test_declared_intervals_do_not_depend_on_the_planner(doubled):
    recipes = list(registry.recipes().values())
    assert [save_interval.save_every(r, n) for r in recipes for n in r.nodes] == [
        r.saves[n] for r in recipes for n in r.nodes
    ]
    moved = [r for r in recipes[::40] if save_interval.plan_interval(recipe_job.job(r)) != r.saves[r.nodes[0]]]
    assert len(moved) > 20  # so the planner has moved


def test_computes_interval_of_planned_size(doubled):
    recipe = registry.find("llama3_8b_pretrain_h100_bf16")
    assert adapt(recipe, Size(num_nodes=recipe.nodes[0])).saves == recipe.saves
    for other in (Size(num_nodes=3, gbs=480), Size(num_nodes=2, gbs=256), Size(num_nodes=2, seq=4096)):
        changed = adapt(recipe, other)
        assert changed.saves == {}
        (nodes,) = changed.nodes
        assert save_interval.save_every(changed, nodes) == save_interval.plan_interval(recipe_job.job(changed, nodes))


@pytest.mark.nemo
@pytest.mark.slow
def test_built_recipes_do_not_depend_on_predicted_step_times():
    run_module("tests.nemo2.doubled")


@pytest.mark.parametrize("value", ["0", "-5", "1.5", "true", "10000000", "ten"])
def test_reports_line_of_invalid_save_interval(value):
    text = f'# Head.\npretrain_h100_bf16 = {{ 1 = "gbs=8,save_every={value}" }}\n'
    with pytest.raises(UserError, match=r"a\.toml:2: save_every is"):
        layout_text.parse(text, "a.toml")


def test_script_adds_missing_intervals(tmp_path):
    path = tmp_path / "llama3_8b.toml"
    head, kept = "# Head.\n\n# Racks.\n", 'sft_h100_bf16 = { 1 = "gbs=32,save_every=7" }\n'
    path.write_text(f'{head}pretrain_h100_bf16 = {{ 1 = "tp=2,gbs=512", 2 = "gbs=512,save_every=7" }}\n{kept}')
    before = layout_text.parse('pretrain_h100_bf16 = { 1 = "tp=2,gbs=512,save_every=3" }', "before")
    script("save_intervals").fill(path)
    computed = {entry.recipe: entry.saves for entry in layout_text.read(path)}["pretrain_h100_bf16"]
    assert computed == {1: save_interval.plan_interval(recipe_job.job(next(iter(recipes_of(path))), 1)), 2: 7}
    assert path.read_text().startswith(f"{head}pretrain_h100_bf16 = {{")
    assert path.read_text().endswith(kept)

    path.write_text('pretrain_h100_bf16 = { 1 = "tp=2,gbs=512" }\n')
    script("save_intervals").fill(path, before=before)
    assert path.read_text() == 'pretrain_h100_bf16 = { 1 = "tp=2,gbs=512,save_every=3" }\n'


def recipes_of(path):
    return registry.read(registry.models()[path.stem], path)


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
