"""Rehearsals: what the checks report of made-up runs, and a real one by the command."""

import json
import re
from typing import Any

import pytest

from superpod.rehearsal import rehearsal_run
from superpod.rehearsal.comparison import compare_runs, data_check, replica_check
from superpod.rehearsal.training import forked_run
from superpod.rehearsal.training.forked_run import FinishedRun
from superpod.requests.request import Request

PLACE = dict.fromkeys(("pipeline_model_parallel", "tensor_model_parallel", "expert_model_parallel"), 0)
PLACE |= {"expert_tensor_parallel": 0, "context_parallel": 0, "data_parallel": 0}


def record(losses, *, weights=None, before="x", **place) -> Any:
    """A rank's record: `weights` = {name: (digest, sharded, expert)}."""
    after = {name: [*facts, False] for name, facts in (weights or {"w": ("a", False, False)}).items()}
    start = {name: [before, *facts[1:]] for name, facts in after.items()}
    inputs = [[[[[7, 8]], [[0, 1]]]]]
    facts = {
        "losses": losses,
        "grad_norms": [2.0 for _ in losses],
        "before": start,
        "after": after,
        "place": PLACE | place,
        "dropped": {},
    }
    no_inputs = set(place) & {"pipeline_model_parallel", "data_parallel"}
    return facts | {"layers": [1, 2], "inputs": [[]] if no_inputs else inputs}


def finished(name, losses, **ranks):
    return FinishedRun(name, 1.0, ranks.get("ranks") or [record(losses)])


def failures(**changes):
    """The failed checks of a rehearsal of four steps in which all is well but for `changes`."""
    one = [5.0, 4.0, 3.0, 2.0]
    runs = {
        "one": finished("one", one),
        "fp32": finished("fp32", one[:3]),
        "own": finished("own", one),
        "resumed": finished("resumed", one[2:]),
        "resharded": finished("resharded", one[2:3]),
    }
    planned = rehearsal_run.plan_rehearsal(Request("llama3_8b_pretrain_a100_bf16"))
    planned.runs = runs | changes
    planned.checks = list(compare_runs.compare_runs(planned, 4))
    return {check.name: check.message for check in planned.checks if not check.passed}


def test_all_is_well():
    assert failures() == {}


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
    assert name in failures(**{run: finished(run, losses)})


def test_layers_that_the_stages_do_not_hold_once_are_reported():
    broken = FinishedRun(
        "fp32", 1.0, [], f"rank 0 failed: CheckpointingException: {compare_runs.LAYERS_NOT_ONCE}.weight'"
    )
    planned = rehearsal_run.plan_rehearsal(Request("llama3_8b_pretrain_a100_bf16"))
    planned.runs = {"one": finished("one", [5.0]), "fp32": broken}
    (check,) = compare_runs.compare_runs(planned, 4)
    assert "do not contain each of 2 layers exactly once" in check.message


def test_other_gradients_are_found_and_where_they_begin():
    differing = record([5.0, 4.0, 3.0]) | {"grad_norms": [2.0, 2.0, 2.1]}
    (message,) = failures(fp32=finished("fp32", [], ranks=[differing])).values()
    assert message == "relative difference 5.0e-02 over 3 steps, 1e-04 allowed; from step 3 on: the optimizer differs"


def test_gradients_of_another_scale_are_found():
    small = record([5.0, 4.0, 3.0, 2.0]) | {"grad_norms": [2.0 / 2**32] * 4}
    failed = failures(own=finished("own", [], ranks=[small]))
    assert failed == {"gradients' scale, bf16": "norm 4.66e-10, in fp32 2"}


def test_a_rank_that_learns_nothing_is_named():
    losses = [5.0, 4.0, 3.0, 2.0]
    idle = record(losses, before="a", data_parallel=1)
    failed = failures(own=finished("own", losses, ranks=[record(losses), idle]))
    assert failed == {"every rank took part": "rank 1 did not train"}


@pytest.mark.parametrize(
    ("facts", "places", "message"),
    [
        (
            (("a", False, False), ("b", False, False)),
            ({}, {"tensor_model_parallel": 1}),
            "w differs between rank 0",
        ),
        ((("a", True, False), ("b", True, False)), ({}, {"tensor_model_parallel": 1}), None),
        ((("a", True, False), ("b", True, False)), ({}, {"data_parallel": 1}), "w differs"),
        ((("a", False, True), ("b", False, True)), ({}, {"expert_model_parallel": 1}), None),
        ((("a", False, True), ("b", False, True)), ({}, {"data_parallel": 1}), "w differs"),
        ((("a", False, False), ("b", False, False)), ({}, {"pipeline_model_parallel": 1}), None),
    ],
)
def test_replicas_that_differ_are_named_and_shards_are_not(facts, places, message):
    ranks = [record([1.0], weights={"w": fact}, **place) for fact, place in zip(facts, places, strict=True)]
    checks = list(replica_check.check_replicas(FinishedRun("own", 1.0, ranks)))
    assert [check.passed for check in checks] == ([False] if message else [])
    if message:
        assert message in checks[0].message


def run_on(*rows, **place):
    """A rank for each row of (tokens, positions, places)."""
    records = [record([1.0], **place) for _, _, place in rows]
    for rank, (tokens, positions, _) in zip(records, rows, strict=True):
        rank["inputs"] = [[[[tokens], [positions]]]]
    return FinishedRun("own", 1.0, records)


HALVES = [([1, 4], [0, 3], {"context_parallel": 0}), ([2, 3], [1, 2], {"context_parallel": 1})]


@pytest.mark.parametrize(
    ("rows", "expected", "message"),
    [
        (HALVES, [[1, 2, 3, 4]], ""),
        (
            [HALVES[0], ([3, 4], [2, 3], {"context_parallel": 1})],
            [[1, 2, 3, 4]],
            "rank 1, .* positions 2-3 instead of 1-2",
        ),
        (
            [([1, 2], [0, 1], {}), ([1, 2], [0, 1], {"data_parallel": 1})],
            [[1, 2], [3, 4]],
            "data-parallel ranks 0 and 1 received the same samples",
        ),
        ([([1, 2], [0, 1], {}), ([1, 2], [0, 1], {"data_parallel": 1})], [[1, 2], [1, 2]], ""),
        (
            [([1, 2], [0, 1], {}), ([1, 3], [0, 1], {"tensor_model_parallel": 1})],
            [[1, 2]],
            "ranks 0 and 1 hold the same",
        ),
        ([([1, 2], [0, 1], {})], [[1, 3]], "differ from those of the run on one rank"),
    ],
)
def test_the_inputs_of_the_ranks(rows, expected, message):
    one = run_on(([], [], {}))
    one.ranks[0]["inputs"] = [[[[row], [[0, 1]]] for row in expected]]
    check = data_check.check_samples(run_on(*rows), one)
    assert check.passed is not bool(message)
    assert re.search(message, check.message)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([[1, 3], [2, 4]], ""),
        ([[1], [2, 4]], "layer 3 of 4 is on no stage"),
        ([[1, 2], [1, 2]], "layer 4 of 4 is on no stage; layer 1 is on 2 stages; layer 2 is on 2 stages"),
    ],
)
def test_every_layer_is_on_one_stage(stages, message):
    ranks = [record([1.0], pipeline_model_parallel=stage) | {"layers": held} for stage, held in enumerate(stages)]
    check = replica_check.check_layers(FinishedRun("own", 1.0, ranks), 4)
    assert check.passed is not bool(message)
    assert message in check.message


def test_a_tied_embedding_is_compared_across_stages():
    ranks = [record([1.0], pipeline_model_parallel=stage) for stage in (0, 1)]
    for rank, name, digest in zip(ranks, ("embedding.weight", "output_layer.weight"), "ab", strict=True):
        rank["after"] = {name: [digest, True, False, True]}
    (check,) = replica_check.check_replicas(FinishedRun("own", 1.0, ranks))
    assert "the tied embedding differs between rank 0 and rank 1" in check.message


def test_the_last_error_of_a_rank(tmp_path):
    log = tmp_path / "0.log"
    log.write_text("chatter\nTraceback (most recent call last):\n  File x\n    code\nValueError: why\nmore\n")
    assert forked_run._last_error(log) == "ValueError: why"
    log.write_text("")
    assert forked_run._last_error(log) == "its log is empty"


@pytest.mark.nemo
@pytest.mark.train
@pytest.mark.slow
def test_the_command(recipes_cli):
    done = recipes_cli("rehearse", "tiny_llama3", "--nodes", 2, "--steps", 6, "--json", timeout=580)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    facts = json.loads(done.stdout)
    assert facts["passed"]
    assert facts["ranks"] == 4
    names = {check["name"] for check in facts["checks"]}
    assert {"loss falls", "one rank's losses, fp32", "resumed", "resharded to one rank", "replicas agree"} <= names


def test_a_recipe_that_is_not_there_is_the_users_mistake(recipes_cli):
    done = recipes_cli("rehearse", "llama3_8b_pretrain_a100_bf61")
    assert done.returncode == 2
    assert "there is no recipe" in done.stderr


@pytest.mark.nemo
@pytest.mark.train
@pytest.mark.long
def test_an_override_is_rehearsed(recipes_cli):
    override = "trainer.strategy.pipeline_model_parallel_size=2"
    done = recipes_cli("rehearse", "tiny_llama3", override, "trainer.devices=4", "--steps", 4, "--json", timeout=580)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    facts = json.loads(done.stdout)
    assert facts["passed"]
    assert "TP2 PP2" in facts["topology"]
