"""The table of options is of today: each option, kind and precision has a line, and what a line says is so."""

import json
import subprocess
import sys

import pytest

from superpod.rehearsal import option_table, option_trials, table
from superpod.rehearsal.option_cases import GPUS, MODELS, cases
from tests.rehearsal.case_client import CaseRequest
from tests.rehearsal.test_table import CHECKS

RESULTS = json.loads(option_table.RESULTS.read_text())
CASES = {case.key: case for case in cases()}
EXECUTED = {key: line for key, line in RESULTS.items() if line["outcome"] == option_trials.REHEARSED}
NEVER = {"nccl_debug", "nccl_simple_ring", "nccl_low_memory", "cuda_graphs", "offload_activations", "stragglers"}
"""Options of which a CPU executes nothing."""


def test_every_option_has_a_line_for_each_kind_and_precision():
    assert set(RESULTS) == set(CASES), "python -m superpod.rehearsal.option_table"
    assert {(line["recipe"], *line["overrides"]) for line in RESULTS.values()} == {
        (case.recipe, *case.overrides) for case in CASES.values()
    }


def test_no_line_failed_and_none_waits():
    done = {*option_table.WORDS} - {option_trials.FAILED}
    assert {key: line["reason"] for key, line in RESULTS.items() if line["outcome"] not in done} == {}


def test_what_was_rehearsed_passed_every_check():
    assert {key for key, line in EXECUTED.items() if not set(line["checks"]) >= CHECKS} == set()


def test_an_option_is_rehearsed_on_every_kind_of_recipe_that_may_have_it():
    for option in {case.option for case in CASES.values()} - NEVER:
        lines = {kind: RESULTS[f"{option}/{kind}/bf16"]["outcome"] for kind in MODELS}
        assert set(lines.values()) <= {option_trials.REHEARSED, option_trials.REFUSED}, (option, lines)
        assert option_trials.REHEARSED in lines.values(), option


def test_a_refusal_names_a_next_step():
    refused = {key: line for key, line in RESULTS.items() if line["outcome"] == option_trials.REFUSED}
    assert {key for key, line in refused.items() if not (line["reason"] and line["next"])} == set()


def test_the_page_has_the_current_table():
    page = table.PAGE.read_text()
    assert option_table.with_table(page, RESULTS) == page, "python -m superpod.rehearsal.option_table --write"


def differences(judged):
    """Lines of the file that are not what the rules and the options say now."""
    differing = {}
    for key, now in judged.items():
        line = RESULTS[key]
        same = all(line.get(name) == now.get(name) for name in ("recipe", "overrides", "changes"))
        if now["outcome"] in (option_trials.REFUSED, option_trials.UNCHANGED):
            same = same and {name: line.get(name) for name in now} == now
        else:
            same = same and line["outcome"] in (option_trials.REHEARSED, option_trials.BUILT)
        if not same:
            differing[key] = now
    return differing


@pytest.mark.nemo
@pytest.mark.parametrize(
    "outcome",
    [
        pytest.param(
            CaseRequest(f"options-{name}"), marks=pytest.mark.slow if name == "bf16" else pytest.mark.long, id=name
        )
        for name in GPUS
    ],
    indirect=True,
)
def test_what_is_refused_and_what_an_option_changes_is_as_the_file_says(outcome):
    assert outcome["outcome"] == "passed", (outcome["error"], outcome["log"])
    assert outcome["value"]
    assert differences(outcome["value"]) == {}, "python -m superpod.rehearsal.option_table"


@pytest.mark.parametrize("changed", ["reason", "changes"])
def test_a_line_that_says_something_else_is_found(changed):
    of = {"reason": option_trials.REFUSED, "changes": option_trials.REHEARSED}[changed]
    key, line = next((key, line) for key, line in RESULTS.items() if line["outcome"] == of)
    now = {name: line.get(name) for name in ("recipe", "overrides", "outcome", "reason", "next", "changes")}
    now = {name: value for name, value in now.items() if value is not None}
    assert differences({key: now}) == {}
    assert set(differences({key: now | {changed: "another"}})) == {key}


@pytest.mark.nemo
@pytest.mark.slow
def test_a_refused_option_ends_the_command_with_its_reason(recipes_cli):
    line = RESULTS["fsdp/dense/fp16"]
    done = recipes_cli("rehearse", line["recipe"], *line["overrides"])
    assert done.returncode == 2
    for text in (line["reason"], line["next"]):
        assert " ".join(text.split()) in " ".join(done.stderr.split())


@pytest.mark.nemo
@pytest.mark.train
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_everything_that_was_rehearsed_in_bf16_is_rehearsed_again(tmp_path):
    """Six minutes on two cores."""
    keys = [key for key in EXECUTED if key.endswith("/bf16")]
    out = tmp_path / "options.json"
    command = [sys.executable, "-W", "ignore", "-m", "superpod.rehearsal.option_table", "--out", str(out), *keys]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    results = json.loads(out.read_text())
    assert {key for key in keys if not set(results[key]["checks"]) >= CHECKS} == set()
