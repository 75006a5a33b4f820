"""A proof's own logic, with stand-ins for the processes that build; test_proof_builds.py has the real ones."""

import dataclasses
import itertools
import json

import pytest

from superpod.collection import registry
from superpod.collection.facts import proof_level
from superpod.errors import counted
from superpod.rehearsal.proof import parameter_counts, proof, proof_pool, proof_store
from superpod.rehearsal.proof.rank_models import SizeKey
from tests.rehearsal.proof.proof_stub import StubWorkers, by_precision, planned_counts

SOME = ("llama32_1b_sft_h100_bf16", "llama32_1b_pretrain_h100_bf16", "llama32_1b_pretrain_h100_fp8ds")


@pytest.fixture
def stub(monkeypatch):
    def use(resolve=by_precision, build=planned_counts, **how):
        workers = StubWorkers(resolve, build, **how)
        monkeypatch.setattr(proof_pool, "Workers", workers)
        return workers

    return use


def prove(names, folder, **how):
    return proof.prove([registry.find(name) for name in names], cache_file=folder / "proof.json", **how)


def failed(proven):
    return {(failure.recipe, failure.nodes) for failure in proven.failures}


def test_sizes_with_one_digest_are_built_once_and_remembered(stub, tmp_path):
    workers = stub()
    first = prove(SOME, tmp_path)
    assert (first.failures, first.recipes) == ([], 3)
    assert first.sizes == sum(len(registry.find(name).nodes) for name in SOME) == len(workers.calls["resolve_all"])
    assert first.built == len(workers.calls["build_all"]) == first.configurations < first.models
    assert (first.resolved_now, first.built_now) == (first.sizes, first.built)
    workers = stub()
    second = prove(SOME, tmp_path, note=pytest.fail)
    assert (second.resolved_now, second.built_now) == (0, 0)
    assert workers.calls == {"resolve_all": [], "build_all": []}
    assert (second.digests, second.models, second.built) == (first.digests, first.models, first.built)


def test_a_verdict_depends_on_the_recipe_alone(stub, tmp_path):
    """Whatever was proven before, in one file or another: of each recipe the same sizes fail."""

    def build(size):
        return {"error": "AssertionError: no"} if "fp8ds" in size.recipe else planned_counts(size)

    stub(build=build)
    every = failed(prove(SOME, tmp_path))
    assert {name for name, _ in every} == {SOME[2]}
    for place, order in enumerate(itertools.permutations(SOME)):
        folder = tmp_path / str(place)
        verdicts = [failed(prove([name], folder)) for name in order]
        assert set().union(*verdicts) == every


def test_a_constructor_that_measures_the_world_is_built_at_each_world(stub, tmp_path):
    def build(size):
        if size.nodes > 2:
            return {"error": "AssertionError: too many GPUs", "world": ["DATA_PARALLEL_GROUP"]}
        return planned_counts(size) | {"world": ["DATA_PARALLEL_GROUP"]}

    workers = stub(resolve=lambda size: {"digest": "one"}, build=build)
    recipe = registry.find(SOME[1])
    layouts = dict.fromkeys((1, 2, 4), recipe.layout())
    proven = proof.prove([dataclasses.replace(recipe, layouts=layouts)], cache_file=tmp_path / "proof.json")
    assert failed(proven) == {(SOME[1], 4)}
    assert [nodes for _, nodes in workers.calls["build_all"]] == [1, 1, 2, 4]


def test_what_the_planner_refuses_is_named_and_not_built(stub, tmp_path):
    workers = stub()
    recipe = registry.find(SOME[1])
    layout = recipe.layout()
    broken = dataclasses.replace(recipe, layouts={1: dataclasses.replace(layout, tp=3, sp=True)})
    huge = dataclasses.replace(recipe, layouts={1: dataclasses.replace(layout, mbs=64)})
    (illegal,) = proof.prove([broken], cache_file=tmp_path / "proof.json").failures
    assert "illegal" in illegal.why
    assert "tp" in illegal.why
    (oom,) = proof.prove([huge], cache_file=tmp_path / "proof.json").failures
    assert "oom" in oom.why
    assert workers.calls["build_all"] == []


def test_a_configuration_that_megatron_refuses_is_a_failure_of_its_size(stub, tmp_path):
    def resolve(size):
        return {"error": "ValueError: no"} if size.nodes == 1 else by_precision(size)

    workers = stub(resolve=resolve)
    proven = prove(SOME[1:2], tmp_path)
    assert failed(proven) == {(SOME[1], 1)}
    assert (SOME[1], 1) not in proven.digests
    assert (SOME[1], 1) not in workers.calls["build_all"]


def test_a_count_that_differs_from_the_planners_is_a_failure_of_every_size_with_that_model(stub, tmp_path):
    def build(size):
        counts = planned_counts(size)["parameters"]
        counts[0][0] += size.recipe == SOME[1]
        return {"parameters": counts}

    stub(build=build)
    proven = prove(SOME, tmp_path)
    assert failed(proven) == {(SOME[1], nodes) for nodes in registry.find(SOME[1]).nodes}
    assert all("but the planner counts" in failure.why for failure in proven.failures)


def test_a_model_that_needs_a_gpu_package_is_named_and_no_failure(stub, tmp_path):
    stub(build=lambda size: {"missing": "ImportError: mamba_ssm"})
    proven = prove(SOME[:1], tmp_path)
    assert (proven.failures, proven.unproven) == ([], {"llama32_1b": "ImportError: mamba_ssm"})


def test_ctrl_c_keeps_what_was_built_and_leaves_no_half_file(stub, tmp_path):
    stub(interrupt_after=2)
    with pytest.raises(KeyboardInterrupt):
        prove(SOME, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["proof.json"]
    (results,) = json.loads((tmp_path / "proof.json").read_text())["proof"].values()
    assert len(results["resolved"]) == 2
    workers = stub()
    whole = prove(SOME, tmp_path)
    assert len(workers.calls["resolve_all"]) == whole.sizes - 2


@pytest.mark.slow
def test_every_size_of_every_recipe_is_legal_and_fits():
    sizes = [(recipe, nodes) for recipe in registry.recipes().values() for nodes in recipe.nodes]
    assert len(sizes) > 17_900  # of 5,357 recipes: what cannot start has none (collection/facts/absent.py)
    assert proof.find_refused(proof.plan(sizes)) == []


BROKEN = "gemma3_1b_sft_h100_bf16"
AS_KNOWN = "TypeError: Gemma3SelfAttention.forward() got an unexpected keyword argument 'rotary_pos_cos_sin'"


@pytest.mark.parametrize("step", ["resolve", "build"])
def test_a_model_that_fails_as_it_is_known_to_is_no_failure(stub, tmp_path, step):
    stub(**({"resolve": by_precision} | {step: lambda size: {"error": AS_KNOWN}}))
    proven = prove([BROKEN], tmp_path)
    recipe = registry.find(BROKEN)
    assert proven.failures == []
    assert {(known.nodes, known.why) for known in proven.known} == {(n, recipe.model.broken) for n in recipe.nodes}
    assert proven.digests == {}


def test_a_model_known_to_be_broken_that_fails_otherwise_is_a_failure(stub, tmp_path):
    stub(by_precision, build=lambda size: {"error": "AssertionError: another matter"})
    proven = prove([BROKEN], tmp_path)
    assert proven.known == []
    assert {failure.why for failure in proven.failures} == {"AssertionError: another matter"}


def test_a_model_known_to_be_broken_that_builds_is_a_failure(stub, tmp_path):
    """So that the fact is taken away once NeMo or Megatron has mended it."""
    stub(by_precision)
    proven = prove([BROKEN], tmp_path)
    assert proven.known == []
    assert len(proven.failures) == len(registry.find(BROKEN).nodes)
    assert "the model can be built now" in proven.failures[0].why


@pytest.fixture
def written(stub, tmp_path, monkeypatch):
    """The recipes of a small model, what a proof of them has written, and a cache that is empty."""
    monkeypatch.setattr(proof_level, "PROOF_FILE", tmp_path / "proven.json")
    recipes = [recipe for recipe in registry.recipes().values() if recipe.model.name == "llama32_1b"]
    stub()
    first = proof.prove(recipes, cache_file=tmp_path / "first.json")
    assert (first.failures, first.standing) == ([], 0)
    proof_store.write_results(first, recipes)
    return recipes, proof_level.read(), tmp_path / "second.json"


def test_what_was_built_from_the_same_inputs_is_not_built_anew(stub, written):
    recipes, known, cache = written
    workers = stub()
    second = proof.prove(recipes, cache_file=cache, saved_proof=known)
    assert (second.standing, second.built_now, workers.calls["build_all"]) == (second.sizes, 0, [])
    assert second.resolved_now == second.sizes
    proof_store.write_results(second, recipes)
    assert proof_level.read() == known
    stub()
    assert proof.prove(recipes, cache_file=cache).built_now > 0, "a proof that writes nothing builds"


RECIPE = registry.find("llama32_1b_pretrain_h100_bf16")
WRONG = SizeKey.from_recipe(RECIPE, RECIPE.nodes[0])


def other_digest(size):
    one = by_precision(size)
    return {"digest": one["digest"] + "!"} if size == WRONG else one


def test_another_configuration_of_one_size_is_built_alone(stub, written):
    recipes, known, cache = written
    workers = stub(other_digest)
    second = proof.prove(recipes, cache_file=cache, saved_proof=known)
    assert second.standing == second.sizes - 1
    assert workers.calls["build_all"] == [(WRONG.recipe, WRONG.nodes)]
    assert proof_store.differences(known, second.digests) == [
        f"{WRONG.recipe} on {counted(WRONG.nodes, 'node')} resolves to a different configuration than the verified one"
    ]


def test_a_build_that_differs_is_seen_where_the_inputs_are_the_same(stub, written):
    recipes, known, cache = written
    stub(build=lambda size: planned_counts(size) | {"built": "other"})
    second = proof.prove(recipes, cache_file=cache)
    assert len(proof_store.differences(known, second.digests)) == second.sizes


def test_a_planner_that_counts_otherwise_is_held_against_real_models(stub, written, monkeypatch):
    recipes, known, cache = written
    count = parameter_counts._count
    monkeypatch.setattr(parameter_counts, "_count", lambda task, job: [1 for _ in count(task, job)])
    stub(build=lambda size: {"parameters": [[0]]})
    second = proof.prove(recipes, cache_file=cache, saved_proof=known)
    counted = {(r.name, nodes) for r in recipes if r.task != "dora" for nodes in r.nodes}
    assert failed(second) == counted


def test_a_planner_that_must_be_exact_is_held_against_real_models(stub, written, monkeypatch):
    recipes, known, cache = written
    monkeypatch.setattr(proof, "tolerance", lambda model: 0.01)
    stub()
    assert proof.prove(recipes, cache_file=cache, saved_proof=known).standing == 0


def test_a_model_that_is_called_broken_since_is_built(stub, written):
    recipes, known, cache = written
    called = [dataclasses.replace(r, model=dataclasses.replace(r.model, broken="it breaks")) for r in recipes]
    stub()
    second = proof.prove(called, cache_file=cache, saved_proof=known)
    assert second.standing == 0
    assert len(second.failures) == second.sizes
    assert all("the model can be built now" in failure.why for failure in second.failures)


def test_a_size_that_failed_is_not_in_the_file(stub, tmp_path, monkeypatch):
    monkeypatch.setattr(proof_level, "PROOF_FILE", tmp_path / "proven.json")

    def build(size):
        return {"error": "AssertionError: no"} if "fp8ds" in size.recipe else planned_counts(size)

    stub(build=build)
    recipes = [registry.find(name) for name in SOME]
    first = proof.prove(recipes, cache_file=tmp_path / "first.json")
    proof_store.write_results(first, recipes)
    stub(build=build)
    second = proof.prove(recipes, cache_file=tmp_path / "second.json", saved_proof=proof_level.read())
    assert failed(second) == failed(first) != set()
    assert second.standing == second.sizes - len(second.failures)


def test_at_most_so_many_configurations_are_built_one_of_each_kind_first(stub, tmp_path):
    workers = stub()
    proven = prove(SOME, tmp_path, max_builds=2)
    kinds = [(name, nodes) for name, nodes in workers.calls["build_all"]]
    assert len(kinds) == 2
    assert len({registry.find(name).precision for name, _ in kinds}) == 2, "the second precision before a second size"
    assert proven.left > 0
    recorded = [one for one in proven.digests.values() if one.built != proof_level.NOT_RECORDED]
    assert len(recorded) == proven.sizes - proven.left
