"""`recipes list`."""

import json

from superpod.collection.facts import proof_level
from superpod.collection.registry import recipes


def test_list_json_has_all_recipes(recipes_cli):
    facts = json.loads(recipes_cli("list", "--json").stdout)
    assert [f["name"] for f in facts] == list(recipes())
    assert all(f["layouts"] and f["title"] for f in facts)


def test_list_filters_by_words(recipes_cli):
    assert [f["name"] for f in json.loads(recipes_cli("list", "tiny", "fp32", "--json").stdout)] == ["tiny_llama3_fp32"]


def test_recipes_are_listed_with_their_proof_level(recipes_cli):
    proofs = [fact["proof"] for fact in json.loads(recipes_cli("list", "tiny", "--json").stdout)]
    assert {proof["level"] for proof in proofs} <= set(proof_level.LEVELS)
    shown = recipes_cli("list", "tiny_llama3").stdout
    assert "proof" in shown.splitlines()[0]
    legend = next(line for line in shown.splitlines() if line.startswith("proof: "))
    reached = {proof["level"] for proof in proofs} | {level for proof in proofs for level in proof["further"].values()}
    assert [level for level in proof_level.LEVELS if f" {level} = " in legend] == [
        level for level in proof_level.LEVELS if level in reached
    ]
    assert "recipes prove NAME" in legend
    assert recipes_cli("list").stdout.splitlines()[-2].startswith("proof: ")


def test_recipes_that_cannot_exist_are_refused_with_the_reason_of_show(recipes_cli):
    for words in (["llama3_8b", "fp16"], ["fp16"]):
        done = recipes_cli("list", *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert "with=fp16" in done.stderr
    listed, shown = recipes_cli("list", "deepseek_v3", "sft", "a100"), recipes_cli("show", "deepseek_v3_sft_a100_bf16")
    assert listed.returncode == shown.returncode == 2
    assert listed.stderr == shown.stderr
    assert "leave one of them out" not in listed.stderr
