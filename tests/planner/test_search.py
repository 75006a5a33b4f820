"""The search costs what the rules allow, as the scalar model costs it, and ranks what fits."""

import random
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superpod.errors import UserError
from superpod.planner import explain, hardware, legality, models, predict, search
from superpod.planner.hardware import GIB
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob
from superpod.planner.search import Space


@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "seq", "gbs", "precision"),
    [
        ("llama31_405b", "h100", 1024, 8192, 512, "fp8cs"),
        ("qwen3_30b_a3b", "gb200", 64, 4096, 512, "bf16"),
        ("deepseek_v3", "h100", 512, 4096, 1024, "fp8bw"),
        ("nemotronh_56b", "b200", 64, 8192, 192, "bf16"),
    ],
)
def test_sampled_layouts_cost_what_the_scalar_model_says(run, model, gpu, gpus, seq, gbs, precision):
    result = search.search(run(model, gpu, gpus, seq, gbs, precision))
    drawn = random.Random(0).sample(range(len(result)), min(250, len(result)))
    jobs = [result.job_of(i) for i in drawn]
    for i, job in zip(drawn, jobs, strict=True):
        alone = predict.one(job)
        assert alone.allocated_gib_max is not None, alone.reason
        assert alone.reserved_gib_max is not None
        assert alone.step_time_s == pytest.approx(result.seconds[i], rel=1e-9)
        assert alone.allocated_gib_max * GIB == pytest.approx(result.allocated[i], rel=1e-9)
        assert alone.reserved_gib_max * GIB == pytest.approx(result.reserved[i], rel=1e-9)


DEGREES = {
    "tp": (1, 2, 4, 8),
    "pp": (1, 2, 3, 4, 8),
    "vp": (None, 2, 4),
    "cp": (1, 2, 4),
    "mbs": (1, 2),
    "sp": (False, True),
}


@pytest.mark.parametrize("gpus", [1, 2, 6, 8, 16])
def test_a_layout_is_found_if_and_only_if_it_is_legal(run, gpus):
    """Every combination of a small space, judged one by one, against what the search enumerates."""
    base = run("llama32_1b", gpus=gpus, gbs=24, seq=2048)
    space = Space(tp=DEGREES["tp"], cp=DEGREES["cp"], mbs=DEGREES["mbs"], deepest_vp=4, sharding=("zero1",))
    space = Space(**{**vars(space), "fixed": {"recompute": "none"}})
    result = search.search(base, space)
    mine = {result.layout(i) for i in range(len(result)) if result.fields["pp"][i] in DEGREES["pp"]}
    mine = {x for x in mine if x.vp in DEGREES["vp"] and not x.embedding_as_layer and not x.loss_as_layer}
    every = (Layout(**dict(zip(DEGREES, values, strict=True)), gbs=24) for values in product(*DEGREES.values()))
    legal = {x for x in every if not legality.violations(base.replace(layout=x))}
    assert {x.replace(etp=None) for x in mine} == legal
    assert legal


def test_what_is_ranked_fits_and_the_fastest_comes_first(run):
    result = search.search(run("llama3_70b", gpus=64))
    assert len(result.ranked)
    assert (result.reserved[result.ranked] <= result.cap).all()
    seconds = result.seconds[result.ranked]
    assert (np.diff(seconds) > -0.002 * seconds[1:]).all()
    assert seconds[0] <= result.seconds[result.fits].min() * 1.002


def test_a_smaller_cap_never_finds_a_faster_layout(run):
    job = run("llama3_70b", gpus=64)
    best = [f.seconds[f.ranked[0]] for f in (search.search(job, memory_cap_gib=cap) for cap in (70, 50, 40))]
    assert best == sorted(best)


def test_what_nearly_fits_is_measured_against_the_cap(run):
    result = search.search(run("llama3_70b", gpus=64, gbs=128), memory_cap_gib=50)
    lines = explain.misses(result)
    assert lines
    assert all(float(line.split(" GiB short")[0].split()[-1]) > 0 for line in lines)


def test_fixed_fields_stay_fixed(run):
    result = search.search(run("llama3_70b", gpus=64), Space(fixed={"tp": 4, "pp": 4, "recompute": "none", "sp": True}))
    layouts = [result.layout(i) for i in range(len(result))]
    assert {(x.tp, x.pp, x.recompute, x.sp) for x in layouts} == {(4, 4, "none", True)}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gpus": 37, "gbs": 512}, "no layout of llama3_8b on 37 GPUs is legal"),
        ({"gpus": 64, "fixed": {"tp": 3}}, "with tp=3"),
        ({"gpus": 64, "fixed": {"tq": 3}}, "no layout key that can be fixed is called 'tq'"),
    ],
)
def test_what_cannot_be_searched_is_said(run, change, says):
    fixed = change.pop("fixed", {})
    with pytest.raises(UserError, match=says):
        search.search(run(**change), Space(fixed=fixed))


@settings(max_examples=25, deadline=None)
@given(
    gpus=st.integers(1, 96),
    steps=st.integers(1, 8),
    rest=st.sampled_from([0, 0, 0, 1]),
    seq=st.integers(1, 5000),
    layers=st.integers(1, 13),
    heads=st.sampled_from([1, 2, 6, 8]),
)
def test_whatever_is_found_is_legal(gpus, steps, rest, seq, layers, heads):
    """With a batch that the GPUs divide there is always a layout: data parallelism alone."""
    node = hardware.node("h100")
    model = models.ModelShape.from_shape(layers=layers, hidden=64 * heads, heads=heads, ffn=256 * heads, vocab=1000)
    job = PlannedJob(
        model, node, hardware.builtin().fabric_of(node), gpus, seq, "bf16", Layout(gbs=gpus * steps + rest)
    )
    try:
        result = search.search(job)
    except UserError:
        assert rest
        return
    for i in random.Random(1).sample(range(len(result)), min(20, len(result))):
        assert legality.violations(result.job_of(i)) == []
    assert np.isfinite(result.seconds).all()
    assert (result.seconds > 0).all()
    assert (result.reserved > 0).all()


def test_what_no_layout_can_change_is_named():
    wanted = "no layout of deepseek_v2_lite on 64 GPUs is legal .* only unfused attention"
    node = hardware.node("a100")
    refused = PlannedJob(
        model=models.find("deepseek_v2_lite"),
        node=node,
        fabric=hardware.builtin().fabric_of(node),
        gpus=64,
        seq=4096,
        precision="bf16",
        layout=Layout(gbs=512),
    )
    with pytest.raises(UserError, match=wanted) as error:
        search.search(refused)
    assert error.value.hint == "another GPU or precision"
