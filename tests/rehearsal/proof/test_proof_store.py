"""The committed file that `recipes prove --write` writes, the cache, and the comparison with what was executed."""

import dataclasses
import json

import pytest

from superpod.collection import registry
from superpod.collection.facts import proof_level
from superpod.collection.facts.proof_level import SizeDigests
from superpod.common import collection, package_files
from superpod.errors import UserError
from superpod.rehearsal.proof import proof_store
from superpod.rehearsal.proof.proof import Failure, Proof
from superpod.rehearsal.proof.proof_store import MAX_VERSIONS, ProofCache


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    """A committed file of this test's, which does not exist yet."""
    monkeypatch.setattr(proof_level, "PROOF_FILE", tmp_path / "proven.json")
    monkeypatch.setattr(proof_level, "TESTED_ON_GPU", tmp_path / "tested_on_gpu.json")
    for remembering in (
        proof_level._read_proofs,
        proof_level._read_broken_sizes,
        proof_level._read_built_digests,
        proof_level._read_tested_sizes,
    ):
        monkeypatch.setattr(proof_level, remembering.__name__, remembering.__wrapped__)
    return tmp_path / "proven.json"


def of(*models):
    return [r for r in registry.recipes().values() if r.model.name in models]


def proof_of(recipes, built="b", inputs="i", **more):
    digests = {(r.name, n): SizeDigests(proof_level.facts(r, n), inputs, built) for r in recipes for n in r.nodes}
    return Proof(versions=proof_store.versions(), digests=digests, **more)


def test_what_is_written_is_what_the_levels_read(file):
    small, other = of("llama32_1b"), of("mamba2_130m")
    why = "AssertionError: no"
    failures = [Failure(small[0].name, nodes, why) for nodes in small[0].nodes]
    proof = proof_of(small[1:], failures=failures, unproven={"mamba2_130m": "ImportError: mamba_ssm"})
    done = proof_store.write_results(proof, [*small, *other])
    assert (done.proven, done.earlier, done.changed) == (sum(len(r.nodes) for r in small[1:]), 0, 0)
    assert [path.name for path in file.parent.iterdir()] == ["proven.json"]
    assert {proof_level.lookup(r).level for r in small[1:]} == {"built with TE"}
    assert {proof_level.lookup(r).level for r in other} == {"planned"}
    assert proof_level.lookup(small[0]).broken == dict.fromkeys(small[0].nodes, why)
    assert proof_level.read()["broken"] == [{"why": why, "recipes": {small[0].name: list(small[0].nodes)}}]


def test_a_proof_of_some_recipes_keeps_what_the_file_says_of_others(file):
    first, second = of("llama32_1b"), of("llama3_8b")
    proof_store.write_results(proof_of(first, failures=[Failure(first[0].name, 1, "one")]), first)
    proof_store.write_results(proof_of(second, failures=[Failure(second[0].name, 1, "two")]), second)
    assert {proof_level.lookup(r).level for r in (*first, *second)} == {"built with TE"}
    assert [group["why"] for group in proof_level.read()["broken"]] == ["one", "two"]
    proof_store.write_results(proof_of(first), first)
    assert [group["why"] for group in proof_level.read()["broken"]] == ["two"]


def test_what_is_resolved_and_not_built_keeps_its_entry_while_its_inputs_are_the_same(file):
    recipes = of("llama32_1b")
    proof_store.write_results(proof_of(recipes), recipes)
    count = len(proof_level.list_digests(proof_level.read()))
    assert count == sum(len(recipe.nodes) for recipe in recipes)
    same = proof_store.write_results(proof_of(recipes, built="-"), recipes)
    assert (same.proven + same.earlier, same.changed) == (count, 0)
    assert {proof_level.lookup(r).level for r in recipes} == {"built with TE"}
    other = proof_store.write_results(proof_of(recipes, inputs="other", built="-"), recipes)
    assert (other.proven, other.changed) == (0, count)
    assert {proof_level.lookup(r).level for r in recipes} == {"planned"}


def test_what_has_changed_since_it_was_built_is_stale_and_says_at_which_sizes(file):
    recipe = registry.find("llama32_1b_pretrain_h100_bf16")
    proof = proof_of([recipe])
    del proof.digests[recipe.name, recipe.nodes[0]]
    proof_store.write_results(proof, [recipe])
    level = proof_level.lookup(recipe)
    assert (level.level, level.why) == ("planned", "stale: new, or changed since it was built at 1 nodes")
    assert level.higher_levels[recipe.nodes[1]] == "built with TE"
    assert "stale" in level.sentence(1)
    assert level.sentence(recipe.nodes[1]).startswith("built with TE")


def test_an_earlier_proof_that_recorded_nothing_says_so(file):
    recipe = registry.find("llama32_1b_pretrain_h100_bf16")
    known = {nodes: f"{proof_level.facts(recipe, nodes)} i -" for nodes in recipe.nodes}
    file.write_text(json.dumps({"versions": proof_store.versions(), "sizes": {recipe.name: known}}))
    assert proof_level.GROUPS_NOT_CHECKED in proof_level.lookup(recipe).sentence(1)
    proof_store.write_results(proof_of([recipe]), [recipe])
    assert proof_level.GROUPS_NOT_CHECKED not in proof_level.lookup(recipe).sentence(1)


def test_the_file_is_compared_with_what_was_executed(file):
    recipes = of("llama32_1b")
    proof_store.write_results(proof_of(recipes), recipes)
    known = proof_level.read()
    assert proof_store.differences(known, proof_of(recipes).digests) == []
    assert proof_store.differences(known, proof_of(recipes, built="-").digests) == [], "resolved only"
    (size, one), *_ = proof_of(recipes).digests.items()
    (built,) = proof_store.differences(known, {size: one._replace(built="x")})
    assert "builds models that differ from the verified ones" in built
    (resolved,) = proof_store.differences(known, {size: one._replace(inputs="x")})
    assert "resolves to a different configuration than the verified one" in resolved
    assert proof_store.differences(known, {size: one._replace(facts="of a new layout")}) == []
    assert "is installed" in proof_store.differences(known | {"versions": {"torch": "0"}}, {})[0]


def test_a_size_stands_where_its_inputs_were_built_with_these_libraries(file):
    recipes = of("llama32_1b")
    proof_store.write_results(proof_of(recipes), recipes)
    known, shown = proof_level.read(), proof_of(recipes, built="-").digests
    assert proof_store.find_unchanged(known, shown) == proof_of(recipes).digests
    assert proof_store.find_unchanged(known, proof_of(recipes, built="-", inputs="x").digests) == {}
    assert proof_store.find_unchanged(known | {"versions": {"torch": "0"}}, shown) == {}
    assert proof_store.find_unchanged({}, shown) == {}
    earlier = {
        name: {nodes: f"{text.rpartition(' ')[0]} -" for nodes, text in sizes.items()}
        for name, sizes in known["sizes"].items()
    }
    assert proof_store.find_unchanged(known | {"sizes": earlier}, shown) == {}


def test_other_libraries_drop_the_file_and_only_a_proof_of_all_may(file):
    recipes = of("llama32_1b")
    proof_store.write_results(proof_of(recipes), recipes)
    file.write_text(json.dumps(proof_level.read() | {"versions": {"torch": "0"}}))
    with pytest.raises(UserError, match="would lose other recipes"):
        proof_store.refuse_to_write(recipes)
    proof_store.refuse_to_write(registry.recipes().values())


def test_a_collection_is_kept_out_of_the_committed_file(tmp_path, monkeypatch):
    (tmp_path / "layouts").mkdir()
    (tmp_path / "layouts" / "tiny_llama3.toml").write_text("")
    monkeypatch.setenv(collection.VARIABLE, str(tmp_path))
    with pytest.raises(UserError, match="collections"):
        proof_store.refuse_to_write(of("llama32_1b"))


def test_a_damaged_file_is_named(file):
    file.write_text("<<<<<<< HEAD\n{}")
    with pytest.raises(UserError, match=r"proven\.json is corrupt"):
        proof_level.read()


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
    monkeypatch.setattr(proof_store, "REHEARSALS", tmp_path / "rehearsals.json")

    def counted(**more):
        (tmp_path / "rehearsals.json").write_text(json.dumps(results | more))
        return proof_store.find_rehearsed([small, large])

    assert large.layout(8).short() == "TP4 PP4 VP5 CP2 SP"
    assert counted() == {small.name: [1], large.name: [8]}
    assert counted(failed=results["one"] | {"passed": False}) == {large.name: [8]}
    assert counted(folded=results["folded"] | {"topology": own.replace("VP 5", "VP 10")}) == {small.name: [1]}


def test_the_facts_of_a_size_have_its_recipe_and_its_layout():
    recipe = registry.find("llama32_1b_pretrain_h100_bf16")
    keys = {proof_level.facts(recipe, 1), proof_level.facts(recipe, 2)}
    facts = {"name": "x", "task": "sft", "gpu": "h200", "precision": "fp8ds", "seq": 1, "gpus_per_node": 4}
    for name, value in facts.items():
        keys.add(proof_level.facts(dataclasses.replace(recipe, **{name: value}), 1))
    layout = recipe.layout(1)
    other = {"sharding": "zero2", "recompute": "full", "recompute_method": "block", "chunks": (1, 1)}
    other |= {"recompute_modules": ("mlp",), "etp": 1, "vp": 2, "first_layers": 3, "last_layers": 3}
    for field in dataclasses.fields(layout):
        value = getattr(layout, field.name)
        changed = other[field.name] if field.name in other else not value if isinstance(value, bool) else value + 1
        laid_out = dataclasses.replace(layout, **{field.name: changed})
        keys.add(proof_level.facts(dataclasses.replace(recipe, layouts={1: laid_out}), 1))
    assert len(keys) == 2 + len(facts) + len(dataclasses.fields(layout))


# -- the cache -------------------------------------------------------------------------------------------------------


def test_results_come_back_and_only_for_this_code(tmp_path, monkeypatch):
    cache = ProofCache(tmp_path / "proof.json")
    cache.resolved["a"] = {"digest": "d"}
    cache.built["d"] = {"parameters": [[1]]}
    cache.save()
    assert ProofCache(tmp_path / "proof.json").resolved == {"a": {"digest": "d"}}
    monkeypatch.setattr(proof_store, "_code", lambda: "other")
    later = ProofCache(tmp_path / "proof.json")
    assert (later.resolved, later.built) == ({}, {})


def test_a_few_versions_of_the_code_are_kept(tmp_path, monkeypatch):
    for number in range(MAX_VERSIONS + 2):
        monkeypatch.setattr(proof_store, "_code", lambda number=number: str(number))
        ProofCache(tmp_path / "proof.json").save()
    kept = json.loads((tmp_path / "proof.json").read_text())["proof"]
    assert list(kept) == [str(number) for number in range(2, MAX_VERSIONS + 2)]


@pytest.mark.parametrize("text", ["{half", "[]", '{"proof": {"code": []}}', '{"resolved": {}, "built": {}}'])
def test_a_cache_that_cannot_be_read_is_empty(tmp_path, text):
    (tmp_path / "proof.json").write_text(text)
    cache = ProofCache(tmp_path / "proof.json")
    assert (cache.resolved, cache.built) == ({}, {})


def test_a_write_that_fails_leaves_the_old_cache(tmp_path, monkeypatch):
    cache = ProofCache(tmp_path / "proof.json")
    cache.save()
    before = (tmp_path / "proof.json").read_text()
    cache.resolved["a"] = {"digest": "d"}
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        cache.save()
    assert (tmp_path / "proof.json").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["proof.json"]


def test_the_cache_depends_on_all_code_that_resolves_and_builds(tmp_path, monkeypatch):
    monkeypatch.setattr(package_files, "PACKAGE", tmp_path)
    for name in (
        "planner/rules/rules.py",
        "planner/data/hardware.toml",
        "nemo2/build/layout.py",
        "rehearsal/te/build.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
        before = proof_store._code.__wrapped__()
        (tmp_path / name).write_text("2")
        assert proof_store._code.__wrapped__() != before, name


def test_a_proof_without_nemo_or_transformer_engine_is_refused(monkeypatch, tmp_path):
    def absent(name):
        raise proof_store.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(proof_store.importlib.metadata, "version", absent)
    with pytest.raises(UserError, match="nemo_toolkit is not installed"):
        proof_store.versions.__wrapped__()
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    with pytest.raises(UserError, match="Transformer Engine"):
        proof_store.versions.__wrapped__()
