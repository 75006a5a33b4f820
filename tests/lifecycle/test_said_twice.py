"""An override that is given twice: with two values it is refused, and a run that continues takes the later one."""

import pytest

from superpod.errors import UserError
from superpod.lifecycle.request import Request
from superpod.node.run_folder import RunFolder

RECIPE = "llama3_8b_pretrain_h100_bf16"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("trainer.max_steps=5", "trainer.max_steps=7"),
        ("trainer.max_steps=5", "trainer.max_steps =7"),
        ("optim.config.optimizer=adam", "optim.config.optimizer=sgd"),
    ],
)
def test_two_values_of_one_field_are_refused(one, other):
    with pytest.raises(UserError) as refused:
        Request(RECIPE, (one, "with=fsdp", other)).check()
    assert f"{one} and {other} contradict each other" in str(refused.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ("trainer.max_steps=1000", "trainer.max_steps=1_000"),
        ("trainer.max_steps=5", "trainer.max_steps*=2", "trainer.max_steps+=1"),
        ("with=fsdp", "with=deterministic"),
    ],
)
def test_one_value_in_two_spellings_and_changes_of_it_are_taken(overrides):
    Request(RECIPE, overrides).check()


def test_a_run_that_continues_takes_the_later_value(tmp_path):
    own = ["trainer.max_steps=5", "trainer.max_steps*=2", "optim.config.lr=1e-4", "data.num_workers+=1"]
    run = RunFolder.create(tmp_path, RECIPE, facts={"overrides": own}, recipe_lines=[])
    request = Request.of_run(run, ("trainer.max_steps=20", "data.num_workers+=1"))
    request.check()
    kept = ("optim.config.lr=1e-4", "data.num_workers+=1", "trainer.max_steps=20", "data.num_workers+=1")
    assert request.overrides == kept
