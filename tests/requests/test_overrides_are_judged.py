"""Overrides are checked before training; valid ones are not refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from superpod.errors import UserError
from superpod.requests.request import Request
from tests.requests import override_cases
from tests.requests.override_cases import LEGITIMATE, MISTAKES

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    out = tmp_path_factory.mktemp("judged") / "answers.json"
    command = [sys.executable, "-W", "ignore", override_cases.__file__, out]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


def name(case):
    return f"{case[0]} {' '.join(case[1])}"


def test_refusal_contains_the_numbers():
    assert sum(case.issue for case in MISTAKES) >= 21
    assert sum(not case.issue for case in MISTAKES) >= 20
    assert len(LEGITIMATE) >= 40


@pytest.mark.nemo
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=[name(case) for case in MISTAKES])
def test_mistake_is_refused(answers, number):
    case, refusal = MISTAKES[number], answers["mistakes"][number]
    assert refusal, "it reached training"
    assert refusal["hint"], f"no next move after: {refusal['message']}"
    for word in case.says:
        assert word in f"{refusal['message']} {refusal['hint']}"


@pytest.mark.nemo
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LEGITIMATE)), ids=[name(case) for case in LEGITIMATE])
def test_valid_change_is_not_refused(answers, number):
    assert answers["legitimate"][number] == {}


PLAIN = [
    "with=fsdpp",
    "modell.config.num_layers=2",
    "trainer.max_steps=-1",
    "optim.config.lr=30",
    "optim.config.optimizer=adamw",
    "log.ckpt.save_top_k=0",
    "optim.config.lr = nan",
]


@pytest.mark.parametrize("override", PLAIN)
def test_plain_value_is_refused_without_nemo(override):
    with pytest.raises(UserError) as refused:
        Request(override_cases.BF16, (override,)).check()
    assert refused.value.hint


@pytest.mark.parametrize("overrides", [("optim.config.lr=30", "optim.config.lr=1e-4"), ("optim.config.lr*=30",)])
def test_the_last_value_of_a_field_counts(overrides):
    Request(override_cases.BF16, overrides).check()
