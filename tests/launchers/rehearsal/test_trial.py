"""Rehearsals: what the checks find in runs that are made up, and real ones of small recipes by the command."""

import json

import pytest

from superpod.launchers.rehearsal import agree, forks, trial
from superpod.launchers.rehearsal.forks import Ended

PLACE = dict.fromkeys(("pipeline_model_parallel", "tensor_model_parallel", "expert_model_parallel"), 0)
PLACE |= {"expert_tensor_parallel": 0, "context_parallel": 0, "data_parallel": 0}


def seen(losses, *, weights=None, before="x", **place):
    """A rank's witness: `weights` = {name: (digest, sharded, expert)}."""
    after = {name: [*facts, True] for name, facts in (weights or {"w": ("a", False, False)}).items()}
    start = {name: [before, *facts[1:]] for name, facts in after.items()}
    return {"losses": losses, "before": start, "after": after, "place": PLACE | place, "dropped": {}}


def ended(name, losses, **ranks):
    return Ended(name, 1.0, ranks.get("ranks") or [seen(losses)])


def verdict(**changes):
    """The failed checks of a rehearsal of four steps in which all is well but for `changes`."""
    one = [5.0, 4.0, 3.0, 2.0]
    runs = {
        "one": ended("one", one),
        "fp32": ended("fp32", one[:3]),
        "own": ended("own", one),
        "resumed": ended("resumed", one[2:]),
        "resharded": ended("resharded", one[2:3]),
    }
    found = trial.plan("llama3_8b_pretrain_a100_bf16", None)
    found.runs = runs | changes
    found.checks = list(trial._verdict(found, 4))
    return {check.name: check.said for check in found.checks if not check.passed}


def test_all_is_well():
    assert verdict() == {}


@pytest.mark.parametrize(
    ("run", "losses", "name"),
    [
        ("fp32", [5.0, 4.0, 3.001], "one rank's losses, fp32"),
        ("own", [5.0, 4.0, 3.0, 2.2], "one rank's losses, bf16"),
        ("own", [5.0, 5.0, 5.0, 5.0], "loss falls"),
        ("resumed", [3.0, 2.001], "resumed"),
        ("resumed", [3.0], "resumed"),
        ("resharded", [3.2], "resharded to one rank"),
        ("fp32", [5.0, 4.0, float("nan")], "one rank's losses, fp32"),
    ],
)
def test_other_losses_are_found(run, losses, name):
    assert name in verdict(**{run: ended(run, losses)})


def test_a_rank_that_learns_nothing_is_named():
    losses = [5.0, 4.0, 3.0, 2.0]
    idle = seen(losses, before="a", data_parallel=1)
    failed = verdict(own=ended("own", losses, ranks=[seen(losses), idle]))
    assert failed == {"every rank took part": "ranks 1 learnt nothing"}


@pytest.mark.parametrize(
    ("facts", "places", "said"),
    [
        (
            (("a", False, False), ("b", False, False)),
            ({}, {"tensor_model_parallel": 1}),
            "w differs between ranks 0",
        ),
        ((("a", True, False), ("b", True, False)), ({}, {"tensor_model_parallel": 1}), None),
        ((("a", True, False), ("b", True, False)), ({}, {"data_parallel": 1}), "w differs"),
        ((("a", False, True), ("b", False, True)), ({}, {"expert_model_parallel": 1}), None),
        ((("a", False, True), ("b", False, True)), ({}, {"data_parallel": 1}), "w differs"),
        ((("a", False, False), ("b", False, False)), ({}, {"pipeline_model_parallel": 1}), None),
    ],
)
def test_replicas_that_differ_are_named_and_shards_are_not(facts, places, said):
    ranks = [seen([1.0], weights={"w": fact}, **place) for fact, place in zip(facts, places, strict=True)]
    found = list(agree.replicas(Ended("own", 1.0, ranks)))
    assert [check.passed for check in found] == ([False] if said else [])
    if said:
        assert said in found[0].said


def test_the_last_words_of_a_rank(tmp_path):
    log = tmp_path / "0.log"
    log.write_text("chatter\nTraceback (most recent call last):\n  File x\n    code\nValueError: why\nmore\n")
    assert forks._last_words(log) == "ValueError: why"
    log.write_text("")
    assert forks._last_words(log) == "no words"


REAL = [("tiny_llama3", "2"), ("llama32_3b_sft_h100_fp8ds", "4")]
SLOW = [("deepseek_v2_lite_pretrain_h200_bf16", "1"), ("nemotron4_340b_lora_a100_bf16", "2")]


@pytest.mark.nemo
@pytest.mark.train
@pytest.mark.parametrize(
    ("name", "nodes"), [*REAL, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)], ids=lambda each: each
)
def test_rehearsed(recipes_cli, name, nodes):
    done = recipes_cli("rehearse", name, "--nodes", nodes, "--json", timeout=580)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    found = json.loads(done.stdout)
    assert found["passed"]
    assert found["ranks"] == 4 or name.startswith("nemotron")
    names = {check["name"] for check in found["checks"]}
    assert {"loss falls", "one rank's losses, fp32", "resumed", "resharded to one rank", "replicas agree"} <= names


def test_a_recipe_that_is_not_there_is_the_users_mistake(recipes_cli):
    done = recipes_cli("rehearse", "llama3_8b_pretrain_a100_bf61")
    assert done.returncode == 2
    assert "no recipe is called" in done.stderr
