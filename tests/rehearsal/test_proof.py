import dataclasses
import json
import zlib

import pytest

from superpod.recipes import registry
from superpod.rehearsal import proof

SOME = ("llama32_1b_sft_h100_bf16", "llama32_1b_pretrain_h100_bf16", "llama32_1b_lora_h100_bf16")


def prove(recipes, tmp_path, **how):
    return proof.prove(recipes, cache_file=tmp_path / "proof.json", workers=1, **how)


@pytest.mark.nemo
def test_a_recipe_is_built_once_and_remembered(tmp_path):
    some = [registry.find(name) for name in SOME]
    first = prove(some, tmp_path)
    assert first.failures == []
    assert first.recipes == 3
    assert first.sizes == sum(len(recipe.nodes) for recipe in some)
    assert first.unique < first.builds
    second = prove(some, tmp_path, note=pytest.fail)
    assert (second.fresh, second.unique, second.failures) == (0, first.unique, [])


@pytest.mark.nemo
def test_what_does_not_start_is_named(tmp_path):
    recipe = registry.find(SOME[1])
    layout = recipe.layout()
    broken = dataclasses.replace(recipe, layouts={1: dataclasses.replace(layout, tp=3, sp=True)})
    huge = dataclasses.replace(recipe, layouts={1: dataclasses.replace(layout, mbs=64)})
    proven = prove([broken], tmp_path)
    assert any("illegal" in failure and "tp" in failure for failure in proven.failures)
    assert any("oom" in failure for failure in prove([huge], tmp_path).failures)


@pytest.mark.nemo
def test_a_count_that_differs_from_the_planners_is_a_failure(tmp_path):
    recipe = registry.find(SOME[1])
    prove([recipe], tmp_path)
    known = json.loads((tmp_path / "proof.json").read_text())
    for entry in known.values():
        if "parameters" in entry:
            entry["parameters"][0][0] += 1
    (tmp_path / "proof.json").write_text(json.dumps(known))
    assert any("and the planner counts" in failure for failure in prove([recipe], tmp_path).failures)


def test_a_cache_that_cannot_be_read_is_no_cache(tmp_path):
    (tmp_path / "proof.json").write_text("{half")
    assert proof._read_outcomes(tmp_path / "proof.json") == {}


def test_models_that_need_a_gpu_package_are_named_not_skipped(tmp_path):
    recipe = registry.find("mamba2_130m_pretrain_h100_bf16")
    proven = prove([recipe], tmp_path)
    assert proven.failures == []
    assert "mamba-ssm" in proven.unproven["mamba2_130m"]


@pytest.mark.slow
def test_every_size_of_every_recipe_is_legal_and_fits():
    sizes = [(recipe, nodes) for recipe in registry.recipes().values() for nodes in recipe.nodes]
    assert len(sizes) > 19_000
    assert proof.refused(proof.plan(sizes)) == []


@pytest.mark.nemo
@pytest.mark.parametrize(
    "one_in",
    [pytest.param(50, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.long)],
)
@pytest.mark.timeout(3600)
def test_recipes_start_at_every_size(one_in, tmp_path_factory, capsys):
    """Cold: nothing is remembered. What is unique, and what is unproven, is printed."""
    some = [recipe for recipe in registry.recipes().values() if zlib.crc32(recipe.name.encode()) % one_in == 0]
    proven = proof.prove(some, cache_file=tmp_path_factory.mktemp("proof") / "proof.json")
    with capsys.disabled():
        print(
            f"\n{proven.recipes} recipes, {proven.sizes} sizes; {proven.unique} of {proven.builds} rank models differ"
        )
        print("unproven:", ", ".join(proven.unproven))
    assert proven.failures == []
