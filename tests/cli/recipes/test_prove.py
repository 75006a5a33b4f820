"""The command line of `recipes prove`; tests/rehearsal/proof tests the proofs."""

import json

import pytest

from superpod.cli.recipes import prove as prove_module
from superpod.collection import registry
from superpod.collection.facts import proof_level
from superpod.errors import UserError
from superpod.rehearsal.proof import proof_pool, proof_store
from superpod.rehearsal.proof.proof import Failure, Proof
from tests.rehearsal.proof.proof_stub import StubWorkers, by_precision

NAME = "llama32_1b_sft_h100_bf16"


@pytest.fixture
def prove(monkeypatch, tmp_path, capsys):
    """Run `recipes prove` in this process with fake build workers; returns its exit code and output."""
    from typer.testing import CliRunner

    from superpod.cli.app import app

    def call(*words, **how):
        monkeypatch.setattr(proof_pool, "Workers", StubWorkers(how.pop("resolve", by_precision), **how))
        done = CliRunner().invoke(app, ["prove", *words, "--cache", str(tmp_path / "proof.json")])
        return done.exit_code, done.stdout

    return call


def test_the_proof_is_summarized_with_versions(prove):
    code, text = prove(NAME)
    assert code == 0, text
    assert "1 recipes at" in text
    assert "transformer_engine 2.9.0" in text
    assert "for sm90" in text
    assert text.rstrip().endswith("proven: all sizes can start")


def test_part_of_a_node_is_planned_and_built(prove):
    code, text = prove(NAME, "--gpus", "1")
    assert code == 0, text
    assert "1 recipes at 1 size" in text


def test_failures_are_listed_by_recipe_and_reason(prove):
    code, text = prove(NAME, build=lambda size: {"error": "AssertionError: no"})
    sizes = ", ".join(map(str, registry.find(NAME).nodes))
    assert code == 1
    assert f"FAILED  {NAME} at {sizes} nodes: AssertionError: no" in text
    assert "proven" not in text.splitlines()[-1]


def test_models_known_to_be_broken_are_listed_separately(prove):
    code, text = prove("gemma3_1b", "sft", "h100", "bf16", build=lambda size: {"error": "no 'rotary_pos_cos_sin'"})
    model = registry.models()["gemma3_1b"]
    assert code == 0, text
    assert f"known not to start  gemma3_1b, 1 recipe: {model.broken}" in text
    assert f"next: {model.workaround}" in text
    assert "proven, except " in text.splitlines()[-1]


def test_a_model_known_to_be_broken_that_builds_is_a_failure(prove):
    code, text = prove("gemma3_1b", "sft", "h100", "bf16")
    assert code == 1
    assert "the model can be built now" in text


def test_json_has_the_failures(prove):
    code, text = prove(NAME, "--json", build=lambda size: {"error": "AssertionError: no"})
    facts = json.loads(text)
    assert (code, facts["recipes"]) == (1, 1)
    assert facts["failures"][0] == {"recipe": NAME, "nodes": 1, "why": "AssertionError: no"}
    assert "digests" not in facts


def test_a_mistyped_word_is_refused_with_a_hint(recipes_cli, tmp_path):
    for words in (
        ["prove", "lamma3", "--cache", str(tmp_path / "p.json")],
        ["list", "lamma3"],
        ["list", "lamma3", "--json"],
    ):
        done = recipes_cli(*words)
        assert (done.returncode, done.stdout) == (2, "")
        assert "no recipe name contains 'lamma3'" in done.stderr
        assert "did you mean llama3" in done.stderr
    done = recipes_cli("list", "h100", "b200")
    assert done.returncode == 2
    assert "h100, b200" in done.stderr


def test_write_keeps_the_proof_of_other_recipes(prove, tmp_path, monkeypatch):
    monkeypatch.setattr(proof_level, "PROOF_FILE", tmp_path / "proven.json")
    code, text = prove("mamba2_130m", "--write")
    assert code == 0, text
    first = proof_level.read()["sizes"]
    code, _ = prove("mamba2_370m", "pretrain", "--write")
    assert code == 0
    both = proof_level.read()
    assert first.items() < both["sizes"].items()
    (tmp_path / "proven.json").write_text(json.dumps(both | {"versions": {"torch": "0"}}))
    code, _ = prove("mamba2_130m", "--write")
    assert code != 0
    assert proof_level.read()["sizes"] == both["sizes"]


def test_most_resolves_all_and_builds_some(prove, tmp_path):
    code, text = prove(NAME, "--most", "0")
    assert code == 0, text
    assert f"{len(registry.find(NAME).nodes)} sizes not built, because of --most" in text
    assert text.rstrip().endswith("those that were built are proven")


def test_a_reason_is_stored_once_for_all_its_sizes():
    proof = Proof(failures=[Failure("a", 1, "x"), Failure("b", 1, "x"), Failure("a", 2, "y"), Failure("a", 4, "x")])
    assert proof_store._group_failures({}, proof, {"a", "b"}) == [
        {"why": "x", "recipes": {"a": [1, 4], "b": [1]}},
        {"why": "y", "recipes": {"a": [2]}},
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"\xffmy notes", "is not a cache file"), (None, "is a folder")],
)
def test_a_file_that_is_not_a_cache_is_not_overwritten(prove, tmp_path, content, says, capsys):
    cache = tmp_path / "proof.json"
    cache.mkdir() if content is None else cache.write_bytes(content)
    with pytest.raises(UserError, match=says):
        prove_module.prove([NAME], cache=cache)
    assert cache.is_dir() if content is None else cache.read_bytes() == content


@pytest.mark.parametrize("content", [b"", b'{"proof":{}}', b'{"resolved":{},"built":{}}', b'{"built": torn'])
def test_old_and_damaged_caches_are_replaced(prove, tmp_path, content):
    (tmp_path / "proof.json").write_bytes(content)
    code, text = prove(NAME)
    assert code == 0, text
    (results,) = json.loads((tmp_path / "proof.json").read_text())["proof"].values()
    assert results["built"]
