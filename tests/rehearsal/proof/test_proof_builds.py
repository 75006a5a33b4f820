"""Proofs with real builds: a recipe's verdict is its own, whatever is proven beside it."""

import json
import subprocess
import sys

import pytest

from superpod.collection import registry
from superpod.collection.facts import proof_level
from superpod.rehearsal.proof import proof, proof_store, resolved
from tests.rehearsal.proof.proof_stub import rotating

pytestmark = pytest.mark.nemo
SMALL = "llama32_1b_sft_h100_bf16"


@pytest.fixture(scope="module")
def answers():
    """What `proof_orders.py` prints."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.rehearsal.proof.proof_orders"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


REFUSED = {
    "precision": {"llama32_1b_sft_h100_fp8ds"},
    "recompute": {"llama32_1b_pretrain_h100_bf16+full"},
    "context": {"llama32_1b_pretrain_h100_bf16+cp"},
    "generation": {"llama32_1b_lora_b200_bf16"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED)
def test_a_verdict_is_the_recipes_own_in_any_order_and_alone(answers, kind):
    """Constructors that refuse one precision, recomputation, CP or GPU: recipes of one set had one key before."""
    for names, failed in answers["orders"][kind]:
        assert set(failed) == REFUSED[kind] & set(names), names


@pytest.mark.slow
def test_every_field_of_the_resolved_configuration_is_in_the_key(answers):
    assert answers["fields_in_no_key"] == []


@pytest.mark.slow
def test_whatever_changes_the_configuration_changes_the_digest(answers):
    digests = answers["keys"]
    assert len(set(digests.values())) == len(digests), digests


@pytest.mark.slow
def test_every_part_of_the_key_changes_with_what_it_says(answers):
    """Every part has a case, and a case whose part is left out of the key is red."""
    parts = answers["parts"]
    assert [name for name, differ in parts["differing"].items() if name not in differ] == []
    assert set(parts["differing"]) == set(parts["whole"])


def plus(number):
    return lambda: number


class Counts:
    def __init__(self, start):
        self.start, self.own = start, self.count

    def count(self):
        return self.start


def with_default(a=1):
    return a


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Counts(1).count, Counts(2).count),
        (plus(1), plus(2)),
        (lambda: 1, lambda: 2),
        (lambda a=1: a, lambda a=2: a),
        (lambda: [lambda: 1], lambda: [lambda: 2]),
    ],
    ids=["method", "closure", "lambda", "defaults", "inner"],
)
def test_functions_differ_in_the_key_as_they_do_in_results(one, other):
    assert resolved.to_json(one) != resolved.to_json(other)
    assert resolved.to_json(one) == resolved.to_json(one)
    json.dumps(resolved.to_json(one))


def test_defaults_are_in_the_key(monkeypatch):
    before = resolved.to_json(with_default)
    monkeypatch.setattr(with_default, "__defaults__", (2,))
    assert resolved.to_json(with_default) != before


@pytest.mark.slow
def test_a_recipe_is_built_with_transformer_engines_layers_and_has_the_planners_parameters(tmp_path):
    proven = proof.prove([registry.find(SMALL)], cache_file=tmp_path / "proof.json", workers=1)
    assert (proven.failures, proven.unproven) == ([], {})
    assert proven.layers >= 4
    assert proven.generations == ["sm90"]
    assert proven.versions["transformer_engine"] == "2.9.0"


@pytest.mark.parametrize(
    "count",
    [pytest.param(40, marks=pytest.mark.slow), pytest.param(None, marks=pytest.mark.long)],
)
@pytest.mark.timeout(3600)
def test_a_share_that_rotates_with_the_commit_starts_at_every_size(count, tmp_path_factory, capsys):
    """Cold: nothing is remembered. What differs, and what is unproven, is printed. None = all of them."""
    some = rotating(count, changed=200)
    proven = proof.prove(some, cache_file=tmp_path_factory.mktemp("proof") / "proof.json")
    with capsys.disabled():
        print(f"\n{proven.recipes} recipes, {proven.sizes} sizes; {proven.built} of {proven.models} rank models differ")
        print(f"{proven.configurations} configurations, {proven.layers} TE layers; {', '.join(proven.generations)}")
        print("unproven:", ", ".join(proven.unproven))
    assert proven.failures == []
    assert proof_store.differences(proof_level.read(), proven.digests) == []
