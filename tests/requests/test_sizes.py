"""Size, sequence length and batch of a request: contradictions, consumers, and resumed runs."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from superpod.collection.facts import proof_level
from superpod.collection.registry import find
from superpod.errors import UserError
from superpod.planner.layout import Layout
from superpod.requests.request import Request
from superpod.runtime.runs.run_folder import RunFolder

NAME = "llama3_8b_pretrain_h100_bf16"
LIMIT_S = 3600
"""Seconds of a script that resolves many sizes, on a machine with other work."""


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (Request(NAME, ("trainer.num_nodes=16",), num_nodes=2), ("--nodes 2", "trainer.num_nodes=16")),
        (Request(NAME, ("trainer.num_nodes*=2",), num_nodes=2), ("--nodes 2", "trainer.num_nodes*=2")),
        (Request(NAME, ("data.seq_length=4096",), seq=2048), ("--seq 2048", "data.seq_length=4096")),
        (Request(NAME, ("model.config.seq_length=4096",), seq=2048), ("--seq 2048", "model.config.seq_length=4096")),
        (Request(NAME, ("data.global_batch_size=64",), gbs=128), ("--gbs 128", "data.global_batch_size=64")),
        (Request(NAME, ("data.global_batch_size=64",), batch_tokens=2**22), ("--batch-tokens", "global_batch_size=64")),
        (Request(NAME, ("data.seq_length=4096", "model.config.seq_length=2048")), ("4096", "2048")),
    ],
)
def test_contradictory_values_are_refused_without_nemo(request_, says):
    with pytest.raises(UserError) as refused:
        request_.check()
    assert refused.value.hint
    for word in says:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    "request_",
    [
        Request(NAME, ("trainer.num_nodes=2",), num_nodes=2),
        Request(NAME, ("data.seq_length=4096", "model.config.seq_length=4096"), seq=4096),
        Request(NAME, ("data.global_batch_size=64",), gbs=64),
    ],
)
def test_repeated_equal_values_are_accepted(request_):
    request_.check()


@pytest.mark.parametrize(
    "overrides",
    [
        ("data.seq_length=4096",),
        ("model.config.seq_length=4096",),
        ("data.seq_length=4096", "model.config.seq_length=4096"),
    ],
)
def test_either_length_override_changes_the_job(overrides):
    request = Request(NAME, overrides)
    assert request.job() == Request(NAME, seq=4096).job()
    (note,) = request.notes()
    assert "4,194,304 before, 2,097,152 now" in note
    assert Request(NAME, (*overrides, "data.global_batch_size=1024")).notes() == []


@pytest.mark.parametrize(
    "request_",
    [
        Request(NAME, num_nodes=16),
        Request(NAME, num_nodes=2, seq=4096, batch_tokens=2**22),
        Request(NAME, seq=65536, best_layout=True),
        Request(NAME, ("data.seq_length=4096",), num_nodes=16, gbs=1024),
        Request(NAME, num_nodes=4),
        Request(NAME),
    ],
)
def test_resumed_run_keeps_decided_values(tmp_path, request_):
    """A later planner may choose another layout; run.json contains the planned one."""
    decided = request_.with_resolved_size()
    run = RunFolder.create(tmp_path / "runs", NAME, facts=decided.facts(), recipe_lines=[])
    resumed = Request.from_run(RunFolder.open(str(run.path)))
    assert resumed == decided
    assert not resumed.best_layout
    assert resumed.with_resolved_size() == resumed
    assert resumed.job() == request_.job()
    resumed.check()


def test_gpus_per_node_of_a_run_is_not_a_request(tmp_path):
    """A rehearsal with trainer.devices=1 resumes with the recipe of its size, not with that of `--gpus 1`."""
    has = {"gpus_per_node": 1, "nodes": 1}
    run = RunFolder.create(tmp_path / "runs", NAME, facts=Request(NAME).facts() | has, recipe_lines=[])
    assert Request.from_run(run) == Request(NAME)
    asked = Request(NAME, gpus_per_node=1)
    run = RunFolder.create(tmp_path / "runs", NAME, facts=asked.facts() | has, recipe_lines=[])
    assert Request.from_run(run) == asked


def test_facts_of_older_runs():
    old = {"overrides": ["trainer.max_steps=5"], "data": None, "num_nodes": 2}
    assert Request.from_facts(NAME, old) == Request(NAME, ("trainer.max_steps=5",), None, 2)
    assert Request.from_facts(NAME, old).facts() == old


def test_override_at_resume_replaces_an_option(tmp_path):
    run = RunFolder.create(tmp_path / "runs", NAME, facts=Request(NAME, gbs=256).facts(), recipe_lines=[])
    resumed = Request.from_run(run, ["data.global_batch_size=512"])
    assert (resumed.gbs, resumed.overrides) == (None, ("data.global_batch_size=512",))
    resumed.check()


def test_illegal_size_is_refused_with_a_legal_layout():
    with pytest.raises(UserError) as refused:
        Request(NAME, seq=4097).require_legal_layout()
    assert "4097" in str(refused.value)
    with pytest.raises(UserError) as refused:
        Request("llama3_70b_pretrain_h100_bf16", seq=8190).require_legal_layout()
    assert refused.value.hint


def test_missing_number():
    with pytest.raises(UserError, match="--seq is 0"):
        Request(NAME, seq=0).check()
    with pytest.raises(UserError, match="--gbs is 0"):
        Request(NAME, gbs=0).check()


def test_proof_covers_declared_sizes():
    recipe = find(NAME)
    request = Request(NAME, num_nodes=16).with_resolved_size()
    sentence = proof_level.sentence(recipe, 16, request.changes())
    assert sentence.startswith("not proven (its model was not built): 16 nodes is not a declared size (1, 2, 4, 8)")
    assert f"recipes prove {NAME} --nodes 16" in sentence
    longer = Request(NAME, seq=16384)
    assert proof_level.changes_what_was_built(longer.changes())
    assert not proof_level.changes_what_was_built(Request(NAME, gbs=1024).changes())
    assert proof_level.explain_refusal(replace(recipe), 16, request.changes()) is None


@pytest.mark.parametrize(
    ("size", "is_another"),
    [
        ({"num_nodes": 8}, False),
        ({"num_nodes": 8, "gbs": 256}, False),
        ({"num_nodes": 8, "layout": Layout(tp=2, pp=2, mbs=1, gbs=512)}, True),
        ({"num_nodes": 8, "gbs": 128, "best_layout": True}, True),
        ({"num_nodes": 1, "gpus_per_node": 4}, True),
    ],
    ids=str,
)
def test_proof_covers_the_declared_layout(size, is_another):
    """A user's layout, or fewer GPUs than a node has, was shown as built with TE."""
    changes = Request("llama3_8b_pretrain_h100_bf16", **size).changes()
    assert proof_level.changes_what_was_built(changes) == is_another


@pytest.mark.nemo
@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_every_consumer_agrees_on_drawn_sizes(tmp_path):
    """show, check, render, export, plan.json, rehearse, explain, and the resumed run."""
    assert "taken" in output("sizes_agree.py", tmp_path / "cache", 12)


@pytest.mark.nemo
@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
def test_every_consumer_agrees_on_many_drawn_sizes(tmp_path):
    assert "taken" in output("sizes_agree.py", tmp_path / "cache", 150)


@pytest.mark.nemo
@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
def test_every_length_of_every_model_and_task(tmp_path):
    """Or is refused: weights with learned positions keep theirs."""
    output("lengths.py", tmp_path / "lengths.json")
    results = json.loads((tmp_path / "lengths.json").read_text())
    assert len(results) >= 200
    wrong = {
        name: outcome
        for name, sequences in results.items()
        for outcome in sequences.values()
        if outcome and not (outcome.startswith("refused") and "learned positions" in outcome)
    }
    assert wrong == {}


def output(script: str, *arguments: object) -> str:
    command = [sys.executable, "-W", "ignore", Path(__file__).with_name(script), *arguments]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
