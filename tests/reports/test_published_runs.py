"""The nearest published run: of the same model, task and GPU, or none."""

import tomllib

import pytest

from superpod.planner import hardware, models
from superpod.reports import published_runs
from tests.reports.report_cases import job


def test_every_row_is_of_a_recipe_that_exists():
    table = tomllib.loads(published_runs.TABLE.read_text())
    assert len(published_runs._read_rows()) == sum(map(len, table.values())) > 80


def test_the_same_precision_comes_before_the_same_size():
    bf16 = published_runs.find_nearest(job())
    assert bf16 is not None
    assert (bf16.recipe, bf16.gpus, bf16.differs) == ("llama3_8b_pretrain_h100_bf16", 16, ())
    far = published_runs.find_nearest(job().replace(gpus=2048))
    assert far is not None
    assert far.recipe == bf16.recipe
    assert any("not 2048" in words for words in far.differs)
    assert "NVIDIA" in bf16.source


@pytest.mark.parametrize(("model", "gpu"), [("llama3_8b", "gb300"), ("llama31_405b", "h100")])
def test_a_run_of_another_model_or_gpu_is_never_taken(model, gpu):
    node = hardware.node(gpu)
    near = published_runs.find_nearest(job().replace(model=models.find(model), node=node))
    assert near is not None
    assert near.recipe.startswith(f"{model}_pretrain_{gpu}")


def test_there_is_none_of_an_unknown_model():
    assert published_runs.find_nearest(job().replace(model=models.find("llama3_8b").replace(name="mine"))) is None
