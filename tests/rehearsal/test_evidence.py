"""The evidence that `recipes prove --write` commits, and when it is too old."""

import json

import pytest

from superpod import collection
from superpod.errors import UserError
from superpod.recipes import registry
from superpod.recipes.facts import proof_level
from superpod.rehearsal import evidence, fingerprint, standing
from superpod.rehearsal.proof import Failure, Proof

MODELS = ("llama32_1b", "mamba2_130m")


@pytest.fixture
def proven():
    """A proof of two models, one of which cannot be built, and its recipes."""
    recipes = [r for r in registry.recipes().values() if r.model.name in MODELS]
    digests = {(r.name, n): f"{r.precision}{n}" for r in recipes if r.model.name == MODELS[0] for n in r.nodes}
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


def use(folder, monkeypatch):
    """Read and write the evidence in this folder."""
    monkeypatch.setattr(proof_level, "EVIDENCE", folder / "proven.json")
    for remembering in (proof_level._evidence, proof_level._broken):
        monkeypatch.setattr(proof_level, remembering.__name__, remembering.__wrapped__)


def of(*models):
    return [r for r in registry.recipes().values() if r.model.name in models]


def test_a_proof_of_some_models_keeps_what_the_file_says_of_others(proven, tmp_path, monkeypatch):
    proof, recipes = proven
    use(tmp_path, monkeypatch)
    evidence.write(proof, recipes)
    other = of("llama3_8b")
    why = [Failure(other[0].name, 1, "AssertionError: no"), Failure(recipes[1].name, 2, "of another proof")]
    second = Proof(versions=fingerprint.versions(), failures=why, unproven={"t5_220m": "not whole"})
    some = [*other, recipes[1]]  # one recipe of a model is no evidence of it
    assert evidence.write(second, some) == evidence.Written(tmp_path / "proven.json", 1, 2, 0)
    known = proof_level.read()
    assert (set(known["models"]), set(known["unproven"])) == ({MODELS[0], "llama3_8b"}, {MODELS[1]})
    sizes = {recipes[0].name: list(recipes[0].nodes), other[0].name: [1]}
    assert known["broken"] == [{"why": "AssertionError: no", "recipes": sizes}]
    assert known["models"]["llama3_8b"]["recipes"] == len(other)
    assert evidence.stale(known) == []
    # A proof of the same models anew replaces what is there.
    anew = Proof(versions=fingerprint.versions(), digests=proof.digests)
    assert evidence.write(anew, of(MODELS[0])) == evidence.Written(tmp_path / "proven.json", 1, 2, 0)
    assert [group["recipes"] for group in proof_level.read()["broken"]] == [{other[0].name: [1]}]


@pytest.mark.parametrize(
    ("change", "dropped"),
    [({"versions": {"torch": "0"}}, 2), ({"code": "other"}, 2), ({"unproven": {"gone_1b": "no"}}, 1)],
)
def test_what_was_proven_of_other_code_or_versions_is_dropped_and_counted(
    proven, tmp_path, monkeypatch, change, dropped
):
    proof, recipes = proven
    use(tmp_path, monkeypatch)
    (tmp_path / "proven.json").write_text(json.dumps(evidence.evidence(proof, recipes) | change))
    done = evidence.write(Proof(versions=fingerprint.versions()), of("llama3_8b"))
    assert (done.proven, done.dropped) == (1, dropped)
    assert evidence.stale(proof_level.read()) == []


def test_a_part_of_a_models_recipes_is_no_evidence():
    with pytest.raises(UserError, match="only some of the recipes of llama3_8b") as refused:
        evidence.whole_models(of("llama3_8b")[1:])
    assert "recipes prove --write llama3_8b" in str(refused.value.hint)


def test_what_is_written_is_what_the_levels_read(proven, tmp_path, monkeypatch):
    proof, recipes = proven
    use(tmp_path, monkeypatch)
    assert evidence.write(proof, recipes) == evidence.Written(tmp_path / "proven.json", 2, 0, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["proven.json"]
    levels = {recipe.name: proof_level.of(recipe) for recipe in recipes}
    assert {levels[r.name].level for r in recipes if r.model.name == MODELS[0]} == {"built with TE"}
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
    before = standing.of_sizes(recipes, proof.digests)
    for size in list(proof.digests)[:3]:
        assert standing.of_sizes(recipes, proof.digests | {size: "other"}) != before
        assert standing.of_sizes(recipes, {k: v for k, v in proof.digests.items() if k != size}) != before


def test_evidence_is_out_of_date_when_anything_that_it_proves_changes(proven, monkeypatch):
    proof, recipes = proven
    known = evidence.evidence(proof, recipes)
    models = [registry.models()[name] for name in MODELS]
    assert evidence.stale(known) == []
    assert evidence.stale({}) == []
    assert evidence.never_proven(known, [*models, registry.models()["llama3_8b"]]) == ["llama3_8b"]
    for name, changed in {"versions": {"torch": "0"}, "code": "other", "rehearsed": {"x": [1]}}.items():
        assert len(evidence.stale(known | {name: changed})) == 1
    monkeypatch.setattr(proof_level, "layouts_hash", lambda files: "changed")
    assert evidence.stale(known) == [f"{MODELS[0]}: its layouts have changed"]


def test_rehearsals_count_at_the_size_and_in_the_topology_that_the_recipe_has(tmp_path, monkeypatch):
    small, large = registry.find("llama32_1b_pretrain_h100_bf16"), registry.find("llama3_70b_pretrain_a100_bf16")
    own = "TP2 PP2 VP2 CP2 SP, folded: TP 4 -> 2, PP 4 -> 2, VP 5 -> 2, DP 2 -> 1"
    results = {
        "one": {"recipe": small.name, "nodes": 1, "passed": True, "topology": "DP2, folded: DP 8 -> 2"},
        "other layout": {"recipe": small.name, "nodes": 2, "passed": True, "topology": "TP2 DP2, folded: DP 8 -> 2"},
        "no such size": {"recipe": small.name, "nodes": 512, "passed": True, "topology": "DP2, folded: DP 4096 -> 2"},
        "gone": {"recipe": "gone_pretrain_h100_bf16", "nodes": 1, "passed": True, "topology": "DP8"},
        "folded": {"recipe": large.name, "nodes": 8, "passed": True, "topology": own},
    }
    monkeypatch.setattr(evidence, "REHEARSALS", tmp_path / "rehearsals.json")

    def counted(**more):
        (tmp_path / "rehearsals.json").write_text(json.dumps(results | more))
        return evidence.rehearsed([small, large])

    assert large.layout(8).short() == "TP4 PP4 VP5 CP2 SP"
    assert counted() == {small.name: [1], large.name: [8]}
    assert counted(failed=results["one"] | {"passed": False}) == {large.name: [8]}
    assert counted(folded=results["folded"] | {"topology": own.replace("VP 5", "VP 10")}) == {small.name: [1]}


def test_a_collection_is_kept_out_of_this_projects_evidence(proven, tmp_path, monkeypatch):
    (tmp_path / "layouts").mkdir()
    (tmp_path / "layouts" / "tiny_llama3.toml").write_text("")
    monkeypatch.setenv(collection.VARIABLE, str(tmp_path))
    with pytest.raises(UserError, match="without collections"):
        evidence.whole_models(proven[1])


def test_the_committed_evidence_holds_nothing_stale():
    """`recipes prove --write WORDS` renews it, and drops what is of other code; no file says that nothing is proven."""
    assert evidence.stale(proof_level.read()) == []


def test_the_committed_evidence_calls_only_those_models_broken_that_say_so():
    known = proof_level.read()
    broken = {
        (registry.find(name).model, group["why"]) for group in known.get("broken", ()) for name in group["recipes"]
    }
    assert {(model.name, why) for model, why in broken} <= {(model.name, model.broken) for model, _ in broken}


def test_every_model_is_proven():
    ours = [m for name, m in registry.models().items() if registry.layout_files(name)]
    assert evidence.never_proven(proof_level.read(), ours) == []


def test_models_known_to_be_broken_are_kept_with_their_reason():
    recipes = [r for r in registry.recipes().values() if r.model.name == "gemma3_1b"]
    why = recipes[0].model.broken
    proof = Proof(versions=fingerprint.versions(), known=[Failure(r.name, n, why) for r in recipes for n in r.nodes])
    written = evidence.evidence(proof, recipes)
    assert written["broken"] == [{"why": why, "recipes": {r.name: list(r.nodes) for r in recipes}}]
    assert written["models"]["gemma3_1b"]["level"] == "planned"


def test_a_proof_of_some_models_is_refused_where_it_would_drop_others(proven, tmp_path, monkeypatch):
    proof, recipes = proven
    use(tmp_path, monkeypatch)
    evidence.refuse_to_drop(recipes)
    known = evidence.evidence(proof, recipes)
    (tmp_path / "proven.json").write_text(json.dumps(known))
    evidence.refuse_to_drop(of(MODELS[0]))
    (tmp_path / "proven.json").write_text(json.dumps(known | {"code": "other"}))
    evidence.refuse_to_drop(recipes)
    with pytest.raises(UserError, match="has 1 more models, proven with other code"):
        evidence.refuse_to_drop(of(MODELS[0]))


def test_a_damaged_file_is_named(tmp_path, monkeypatch):
    use(tmp_path, monkeypatch)
    (tmp_path / "proven.json").write_text("<<<<<<< HEAD\n{}")
    with pytest.raises(UserError, match=r"proven\.json is damaged"):
        proof_level.read()
