"""Test that short runs have a short warm-up."""

import pytest

from superpod.errors import UserError
from superpod.nemo2.build import learning_rate_schedule
from superpod.requests.request import Request

WARMUP = "optim.lr_scheduler.warmup_steps"


@pytest.mark.parametrize(
    ("warmup", "steps", "left"),
    [(50, 6, 0), (50, 20, 2), (50, 500, 50), (50, 499, 49), (0, 6, 0), (2000, 100_000, 2000)],
)
def test_phase_takes_at_most_a_tenth(warmup, steps, left):
    assert learning_rate_schedule.shorten(warmup, steps) == left


@pytest.mark.parametrize(
    ("overrides", "notes"),
    [
        (
            ["trainer.max_steps=6"],
            ["warm-up shortened from 50 to 0 steps: at most a tenth of trainer.max_steps=6"],
        ),
        (
            ["trainer.max_steps=2", " trainer.max_steps =1_00 "],
            ["warm-up shortened from 50 to 10 steps: at most a tenth of trainer.max_steps=100"],
        ),
        (["trainer.max_steps=6", "trainer.max_steps*=2"], []),
        (["trainer.max_steps=6", f"{WARMUP}=3"], []),
        (["trainer.max_steps=500"], []),
        (["trainer.max_steps=six"], []),
        ([], []),
    ],
)
def test_notes_shortened_warmup(overrides, notes):
    assert learning_rate_schedule.notes(50, overrides) == notes


def test_request_notes_it_without_nemo():
    assert "warm-up shortened from 50 to 2 steps" in " ".join(
        Request("llama3_8b_sft_h100_bf16", ("trainer.max_steps=20",)).notes()
    )


@pytest.mark.nemo
@pytest.mark.filterwarnings("ignore")
def test_resolved_run_has_shortened_warmup():
    from superpod.requests.resolve import build_configuration, resolve

    def warmup(*overrides, name="tiny_llama3_sft"):
        return build_configuration(Request(name, overrides))[0].optim.lr_scheduler.warmup_steps

    own = warmup()
    assert own > 10
    assert warmup("trainer.max_steps=6") == 0
    assert warmup("trainer.max_steps=6", name="tiny_llama3") == 0
    assert warmup("trainer.max_steps=20") == 2
    assert warmup("trainer.max_steps=100000") == own
    assert warmup("trainer.max_steps=6", f"{WARMUP}=3") == 3
    with pytest.raises(UserError, match="run of 6 steps"):
        resolve(Request("tiny_llama3_sft", ("trainer.max_steps=6", f"{WARMUP}=6")))
