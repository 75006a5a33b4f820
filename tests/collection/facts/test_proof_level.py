"""Test the proof level of recipes."""

import json

import pytest

from superpod.collection import registry
from superpod.collection.facts import proof_level
from superpod.errors import UserError

NAME = "llama32_1b_pretrain_h100_bf16"
OTHER = "llama32_1b_sft_h100_bf16"
WHY = "AssertionError: no attention backend"


@pytest.fixture
def evidence(tmp_path, monkeypatch):
    """Return a function that sets the content of the proof file and the runs on GPUs."""

    def use(ran="", tested=None, **changes):
        recipes = [registry.find(name) for name in (NAME, OTHER)]
        known = {
            "versions": {"nemo_toolkit": "2.7.3", "megatron-core": "0.15.3", "transformer_engine": "2.9.0"},
            "unproven": {"mamba2_130m": "ImportError: mamba_ssm"},
            "broken": [],
            "rehearsed": {},
            "sizes": {
                recipe.name: {nodes: f"{proof_level.facts(recipe, nodes)} i b" for nodes in recipe.nodes}
                for recipe in recipes
            },
        }
        (tmp_path / "proven.json").write_text(json.dumps(known | changes))
        (tmp_path / "ran_on_gpu.toml").write_text(ran)
        (tmp_path / "tested_on_gpu.json").write_text(
            json.dumps({"tests": [{"gpu": "h200", "versions": {}, "sizes": tested or {}}]})
        )
        monkeypatch.setattr(proof_level, "TESTED_ON_GPU", tmp_path / "tested_on_gpu.json")
        monkeypatch.setattr(proof_level, "PROOF_FILE", tmp_path / "proven.json")
        monkeypatch.setattr(proof_level, "RAN_ON_GPU", tmp_path / "ran_on_gpu.toml")
        forget()

    yield use
    monkeypatch.undo()
    forget()


def forget():
    remembered = ("_read_proofs", "_read_broken_sizes", "_read_built_digests", "_read_gpu_runs", "_read_tested_sizes")
    for name in remembered:
        getattr(proof_level, name).cache_clear()


def level(name):
    return proof_level.lookup(registry.find(name)).level


def ran(nodes, layout="mbs = 2, gbs = 512", passed="true"):
    return f'[[run]]\nrecipe = "{NAME}"\nnodes = {nodes}\nlayout = {{ {layout} }}\npassed = {passed}\n'


def test_levels(evidence):
    evidence()
    assert level(NAME) == "built with TE"
    assert "Transformer Engine 2.9.0" in proof_level.lookup(registry.find(NAME)).sentence(1)
    evidence(rehearsed={NAME: [1]})
    assert proof_level.lookup(registry.find(NAME)).summary == "built with TE, rehearsed at 1 node"
    assert proof_level.lookup(registry.find(OTHER)).summary == "built with TE"
    evidence(rehearsed={NAME: [1]}, ran=ran(1))
    assert proof_level.lookup(registry.find(NAME)).summary == "built with TE, ran on GPU at 1 node"
    evidence(sizes={})
    assert level(NAME) == "planned"


def test_rehearsal_applies_to_its_size_only(evidence):
    evidence(rehearsed={NAME: [2]})
    proven = proof_level.lookup(registry.find(NAME))
    assert proven.sentence(2).startswith("rehearsed at 2 nodes (NeMo")
    assert proven.sentence(1).startswith("built with TE (NeMo")


@pytest.mark.parametrize(
    "runs", [ran(3), ran(1, "tp = 2, gbs = 512"), ran(1, passed="false"), ran(1) + ran(1, passed="false")]
)
def test_gpu_run_counts_with_same_layout_if_none_failed(evidence, runs):
    evidence(ran=ran(2) + runs)
    assert proof_level.lookup(registry.find(NAME)).higher_levels == {2: "ran on GPU"}


def test_model_that_was_not_built_is_planned_with_reason(evidence):
    evidence()
    proven = proof_level.lookup(registry.find("mamba2_130m_pretrain_h100_bf16"))
    assert (proven.level, proven.why) == ("planned", "ImportError: mamba_ssm")
    assert proven.sentence(1) == "planned (ImportError: mamba_ssm)"


def test_proof_of_other_layout_is_stale(evidence):
    evidence(sizes={NAME: {"1": "0123456789 i b"}})
    proven = proof_level.lookup(registry.find(NAME))
    assert (proven.level, proven.why) == ("planned", "stale: new, or changed since it was built")


def test_refuses_size_that_does_not_start(evidence):
    evidence(broken=[{"why": WHY, "recipes": {NAME: [1, 2]}}])
    recipe = registry.find(NAME)
    assert proof_level.lookup(recipe).sentence(1) == f"known not to start: {WHY}"
    assert proof_level.lookup(recipe).summary == "built with TE, 2 sizes broken"
    refused = proof_level.explain_refusal(recipe, 1, ())
    assert refused
    message, hint = refused
    assert WHY in message
    assert hint.startswith("use 4 ")
    assert proof_level.explain_refusal(recipe, 1, ("trainer.max_steps=5",)), "the same models are built"
    assert proof_level.explain_refusal(recipe, recipe.nodes[-1], ()) is None
    assert proof_level.explain_refusal(registry.find(OTHER), 1, ()) is None
    for change in ("model.config.num_layers=2", "trainer.strategy.context_parallel_size=1", "with=full_recompute"):
        assert proof_level.explain_refusal(recipe, 1, (change,)) is None, "another run, of which nothing is known"


def test_overrides_of_the_model_invalidate_the_proof(evidence):
    evidence()
    recipe = registry.find(NAME)
    assert proof_level.sentence(recipe, 1, ("trainer.max_steps=5",)) == proof_level.lookup(recipe).sentence(1)
    changed = proof_level.sentence(recipe, 1, ("data.micro_batch_size=2",))
    assert changed.startswith("built with TE")
    assert changed.endswith("without your changes")


def test_gpu_runs_name_existing_recipes():
    """There are no runs so far; a misspelt name would have no effect."""
    forget()
    assert {run["recipe"] for run in proof_level._read_gpu_runs()} <= set(registry.recipes())


def test_test_on_one_gpu_counts_until_the_recipe_changes(evidence):
    recipe = registry.find(NAME)
    digests = {str(nodes): proof_level.facts(recipe, nodes) for nodes in (1, 2, 4)}
    evidence(tested={NAME: digests | {"4": "changed"}}, rehearsed={NAME: [1, 4]}, ran=ran(2))
    summary = proof_level.lookup(recipe).summary
    assert summary == "built with TE, rehearsed at 4 nodes, tested on one GPU at 1 node, ran on GPU at 2 nodes"
    evidence(tested={NAME: digests})
    assert proof_level.lookup(recipe).summary == "built with TE, tested on one GPU at 1, 2, 4 nodes"


def test_recorded_tests_are_of_recipes_in_the_collection():
    for group in proof_level.read_tested(proof_level.TESTED_ON_GPU):
        for name, sizes in group["sizes"].items():
            assert set(map(int, sizes)) <= set(registry.find(name).nodes), name


def test_a_corrupt_file_of_tests_is_refused(tmp_path):
    file = tmp_path / "tested_on_gpu.json"
    file.write_text("<<<<<<< HEAD")
    with pytest.raises(UserError, match="is corrupt"):
        proof_level.read_tested(file)
