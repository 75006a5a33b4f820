"""How far a recipe was proven, as the evidence says it."""

import json

import pytest

from superpod.collection import registry
from superpod.collection.facts import proof_level

NAME = "llama32_1b_pretrain_h100_bf16"
OTHER = "llama32_1b_sft_h100_bf16"
WHY = "AssertionError: no attention backend"


@pytest.fixture
def evidence(tmp_path, monkeypatch):
    """Use evidence as this function is given it, and these runs on GPUs."""

    def use(ran="", **changes):
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
        monkeypatch.setattr(proof_level, "EVIDENCE", tmp_path / "proven.json")
        monkeypatch.setattr(proof_level, "RAN_ON_GPU", tmp_path / "ran_on_gpu.toml")
        forget()

    yield use
    monkeypatch.undo()
    forget()


def forget():
    for remembering in (proof_level._evidence, proof_level._broken, proof_level._built, proof_level._runs):
        remembering.cache_clear()


def level(name):
    return proof_level.of(registry.find(name)).level


def ran(nodes, layout="mbs = 2, gbs = 512", passed="true"):
    return f'[[run]]\nrecipe = "{NAME}"\nnodes = {nodes}\nlayout = {{ {layout} }}\npassed = {passed}\n'


def test_levels_rise_with_the_evidence(evidence):
    evidence()
    assert level(NAME) == "built with TE"
    assert "Transformer Engine 2.9.0" in proof_level.of(registry.find(NAME)).sentence(1)
    evidence(rehearsed={NAME: [1]})
    assert proof_level.of(registry.find(NAME)).short == "built with TE, rehearsed at 1 node"
    assert proof_level.of(registry.find(OTHER)).short == "built with TE"
    evidence(rehearsed={NAME: [1]}, ran=ran(1))
    assert proof_level.of(registry.find(NAME)).short == "built with TE, ran on GPU at 1 node"
    evidence(sizes={})
    assert level(NAME) == "planned"


def test_a_rehearsal_is_of_its_size_only(evidence):
    evidence(rehearsed={NAME: [2]})
    proven = proof_level.of(registry.find(NAME))
    assert proven.sentence(2).startswith("rehearsed at 2 nodes (NeMo")
    assert proven.sentence(1).startswith("built with TE (NeMo")


@pytest.mark.parametrize(
    "runs", [ran(3), ran(1, "tp = 2, gbs = 512"), ran(1, passed="false"), ran(1) + ran(1, passed="false")]
)
def test_a_run_on_gpus_counts_at_a_size_with_its_layout_where_none_failed(evidence, runs):
    evidence(ran=ran(2) + runs)
    assert proof_level.of(registry.find(NAME)).further == {2: "ran on GPU"}


def test_a_model_that_could_not_be_built_is_planned_and_says_why(evidence):
    evidence()
    proven = proof_level.of(registry.find("mamba2_130m_pretrain_h100_bf16"))
    assert (proven.level, proven.why) == ("planned", "ImportError: mamba_ssm")
    assert proven.sentence(1) == "planned (ImportError: mamba_ssm)"


def test_evidence_for_other_layouts_proves_nothing(evidence):
    evidence(sizes={NAME: {"1": "0123456789 i b"}})
    proven = proof_level.of(registry.find(NAME))
    assert (proven.level, proven.why) == ("planned", "stale: new, or changed since it was built")


def test_what_is_known_not_to_start_is_refused_with_the_way_round(evidence):
    evidence(broken=[{"why": WHY, "recipes": {NAME: [1, 2]}}])
    recipe = registry.find(NAME)
    assert proof_level.of(recipe).sentence(1) == f"known not to start: {WHY}"
    assert proof_level.of(recipe).short == "built with TE, 2 sizes broken"
    refused = proof_level.refusal(recipe, 1, ())
    assert refused
    message, way = refused
    assert WHY in message
    assert way.startswith("it starts at 4")
    assert proof_level.refusal(recipe, 1, ("trainer.max_steps=5",)), "the same models are built"
    assert proof_level.refusal(recipe, recipe.nodes[-1], ()) is None
    assert proof_level.refusal(registry.find(OTHER), 1, ()) is None
    for change in ("model.config.num_layers=2", "trainer.strategy.context_parallel_size=1", "with=full_recompute"):
        assert proof_level.refusal(recipe, 1, (change,)) is None, "another run, of which nothing is known"


def test_overrides_of_what_was_built_leave_the_recipes_proof_behind(evidence):
    evidence()
    recipe = registry.find(NAME)
    assert proof_level.sentence(recipe, 1, ("trainer.max_steps=5",)) == proof_level.of(recipe).sentence(1)
    changed = proof_level.sentence(recipe, 1, ("data.micro_batch_size=2",))
    assert changed.startswith("of the recipe without your changes: built with TE")


def test_runs_on_gpus_are_of_recipes_that_exist():
    """None so far; a name that is mistyped would prove nothing."""
    forget()
    assert {run["recipe"] for run in proof_level._runs()} <= set(registry.recipes())
