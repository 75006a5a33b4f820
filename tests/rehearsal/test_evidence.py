"""The evidence that `recipes prove --write` commits, and when it is too old."""

import json

import pytest

from superpod import collection
from superpod.errors import UserError
from superpod.recipes import registry
from superpod.recipes.facts import proof_level
from superpod.rehearsal import evidence, fingerprint
from superpod.rehearsal.proof import Failure, Proof

MODELS = ("llama32_1b", "mamba2_130m")


@pytest.fixture
def proven():
    """A proof of two models, one of which cannot be built, and its recipes."""
    recipes = [r for r in registry.recipes().values() if r.model.name in MODELS]
    digests = {f"{r.name} {n}": f"{r.precision}{n}" for r in recipes if r.model.name == MODELS[0] for n in r.nodes}
    why = "AssertionError: no"
    failures = [Failure(recipes[0].name, nodes, why) for nodes in recipes[0].nodes]
    proof = Proof(
        recipes=len(recipes),
        versions=fingerprint.versions(),
        unproven={MODELS[1]: "ImportError: mamba_ssm"},
        failures=failures,
        digests=digests,
    )
    return proof, recipes


def test_what_is_written_is_what_the_levels_read(proven, tmp_path, monkeypatch):
    proof, recipes = proven
    monkeypatch.setattr(proof_level, "EVIDENCE", tmp_path / "proven.json")
    for remembering in (proof_level._evidence, proof_level._broken):
        monkeypatch.setattr(proof_level, remembering.__name__, remembering.__wrapped__)
    assert evidence.write(proof, recipes) == tmp_path / "proven.json"
    assert [path.name for path in tmp_path.iterdir()] == ["proven.json"]
    levels = {recipe.name: proof_level.of(recipe) for recipe in recipes}
    assert {levels[r.name].level for r in recipes if r.model.name == MODELS[0]} <= {"built with TE", "rehearsed"}
    assert {levels[r.name].level for r in recipes if r.model.name == MODELS[1]} == {"planned"}
    assert levels[recipes[0].name].broken == dict.fromkeys(recipes[0].nodes, "AssertionError: no")


def test_the_file_has_groups_not_a_line_for_each_size(proven):
    proof, recipes = proven
    written = evidence.evidence(proof, recipes)
    assert written["broken"] == [{"why": "AssertionError: no", "recipes": {recipes[0].name: list(recipes[0].nodes)}}]
    assert len(json.dumps(written, indent=1).splitlines()) < 60
    assert set(written["models"]) == {MODELS[0]}


def test_a_digest_that_changes_changes_the_models_hash(proven):
    proof, recipes = proven
    before = evidence.resolved_hash(recipes, proof.digests)
    for size in list(proof.digests)[:3]:
        assert evidence.resolved_hash(recipes, proof.digests | {size: "other"}) != before
        assert evidence.resolved_hash(recipes, {k: v for k, v in proof.digests.items() if k != size}) != before


def test_evidence_is_out_of_date_when_anything_that_it_proves_changes(proven, monkeypatch):
    proof, recipes = proven
    known = evidence.evidence(proof, recipes)
    models = [registry.models()[name] for name in MODELS]
    assert evidence.out_of_date(known, models) == []
    assert evidence.out_of_date(known, [*models, registry.models()["llama3_8b"]]) == ["llama3_8b was never proven"]
    for name, changed in {"versions": {"torch": "0"}, "code": "other"}.items():
        assert len(evidence.out_of_date(known | {name: changed}, models)) == 1
    monkeypatch.setattr(proof_level, "layouts_hash", lambda files: "changed")
    assert evidence.out_of_date(known, models) == [f"{MODELS[0]}: its layouts have changed"]


def test_rehearsals_that_passed_count_for_recipes_that_still_have_the_size(tmp_path, monkeypatch):
    recipes = [registry.find("llama32_1b_pretrain_h100_bf16"), registry.find("llama32_1b_sft_h100_bf16")]
    results = {
        "one": {"recipe": recipes[0].name, "nodes": 1, "passed": True},
        "two": {"recipe": recipes[1].name, "nodes": 1, "passed": False},
        "three": {"recipe": recipes[1].name, "nodes": 512, "passed": True},
        "four": {"recipe": "gone_pretrain_h100_bf16", "nodes": 1, "passed": True},
    }
    (tmp_path / "rehearsals.json").write_text(json.dumps(results))
    monkeypatch.setattr(evidence, "REHEARSALS", tmp_path / "rehearsals.json")
    assert evidence.rehearsed(recipes) == [recipes[0].name]


def test_a_collection_is_kept_out_of_this_projects_evidence(proven, tmp_path, monkeypatch):
    monkeypatch.setenv(collection.VARIABLE, str(tmp_path))
    with pytest.raises(UserError, match="without collections"):
        evidence.write(*proven)


def test_the_committed_evidence_is_not_older_than_what_it_proves():
    """`recipes prove --write` renews it: before every landing that touches recipes, planner, rehearsal or versions."""
    known = json.loads(proof_level.EVIDENCE.read_text())
    ours = [m for name, m in registry.models().items() if registry.layout_files(name)]
    assert evidence.out_of_date(known, ours) == []
    # Nothing is broken but models that say so, and these are.
    broken = {(registry.find(name).model.name, group["why"]) for group in known["broken"] for name in group["recipes"]}
    assert broken == {(model.name, model.broken) for model in ours if model.broken}


def test_models_known_to_be_broken_are_kept_with_their_reason():
    recipes = [r for r in registry.recipes().values() if r.model.name == "gemma3_1b"]
    why = recipes[0].model.broken
    proof = Proof(versions=fingerprint.versions(), known=[Failure(r.name, n, why) for r in recipes for n in r.nodes])
    written = evidence.evidence(proof, recipes)
    assert written["broken"] == [{"why": why, "recipes": {r.name: list(r.nodes) for r in recipes}}]
    assert written["models"]["gemma3_1b"]["level"] == "planned"
