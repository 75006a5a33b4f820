"""Test MXFP8 parameters, whose gather must not overlap with the forward pass."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from superpod.collection.recipe_job import default_options, job
from superpod.collection.registry import recipes
from superpod.planner import predict

BF16_PARAMETERS, FP8_PARAMETERS = "llama3_8b_pretrain_b200_mxfp8", "llama3_70b_pretrain_b200_mxfp8"


@cache
def mxfp8_jobs():
    return [job(r, size) for r in recipes().values() if r.precision == "mxfp8" for size in r.nodes]


@pytest.mark.slow
def test_mxfp8_gather_does_not_overlap():
    jobs = mxfp8_jobs()
    assert sum(j.options.fp8_params for j in jobs) > 100
    assert not [j for j in jobs if j.options.fp8_params and j.options.overlap_params]


@pytest.mark.slow
def test_mxfp8_parameters_only_if_bf16_does_not_fit():
    """The gather of BF16 parameters overlaps, so they are never slower in the planner."""
    for planned in mxfp8_jobs()[::97]:
        wide = planned.replace(options=replace(planned.options, fp8_params=False, overlap_params=True))
        if planned.options.fp8_params:
            assert predict.one(wide).short_gib > 0
            assert predict.one(planned).short_gib <= 0


def test_exposed_mxfp8_gather_is_planned():
    recipe = recipes()["llama31_405b_pretrain_b200_mxfp8"]
    exposed = job(recipe, 32)
    hidden = exposed.replace(options=default_options("pretrain", "mxfp8", "zero1", recipe.shape))
    assert exposed.options.fp8_params
    assert hidden.options.fp8_params
    assert predict.one(exposed).terms_s["dp"] > 1.5 * predict.one(hidden).terms_s["dp"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Output of tests/nemo2/build/mxfp8_weights.py for a recipe of each kind."""
    script, out = Path(__file__).parent / "mxfp8_weights.py", tmp_path_factory.mktemp("mxfp8") / "out.json"
    command = [sys.executable, "-W", "ignore", script, out, BF16_PARAMETERS, FP8_PARAMETERS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.mark.long
@pytest.mark.nemo
@pytest.mark.parametrize("name", [BF16_PARAMETERS, FP8_PARAMETERS])
def test_weights_survive_the_first_forward(trained, name):
    """Run Megatron's data parallelism and optimizer with the flags of a GPU run on two ranks."""
    start, first, second, third = trained[name]["sums"]
    assert first == start > 0
    assert 0 < third < second < start
    assert trained[name]["ddp"]["fp8_param_gather"] == (name == FP8_PARAMETERS)


@pytest.mark.long
@pytest.mark.nemo
@pytest.mark.parametrize("name", [BF16_PARAMETERS, FP8_PARAMETERS])
def test_overlapped_gather_zeroes_weights(trained, name):
    """Show that the experiment detects the error: with overlap, all weights become 0."""
    before = trained[f"old {name}"]
    assert before["ddp"] == {**before["ddp"], "overlap_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}
    assert before["sums"][0] > 0
    assert before["sums"][1:] == [0, 0, 0]


@pytest.mark.long
@pytest.mark.nemo
def test_refuses_overlapped_gather_by_override(trained):
    assert trained["overridden"] == ["mxfp8_gather"]
    assert trained["as it is"] == []
