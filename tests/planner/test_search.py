"""The search costs what the rules allow, as the scalar model costs it, and ranks what fits."""

import random
import re
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superpod.errors import UserError
from superpod.planner import explain, hardware, legality, models, plans, predict, search, suggestions
from superpod.planner.hardware import GIB
from superpod.planner.layout import Layout
from superpod.planner.planned_job import Options, PlannedJob
from superpod.planner.rules import pipeline_layout
from superpod.planner.search import Space


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        (
            {"compute": 2.0, "tp": 5.0, "pp_bubble": 3.0},
            "tensor-parallel communication, 50% of the step; then the pipe",
        ),
        ({"compute": 6.0, "tp": 3.0, "dp": 1.0}, "compute, 60% of the step; then tensor-parallel communication, 30%"),
        ({"compute": 9.9, "tp": 0.1}, "compute, 99% of the step"),
    ],
)
def test_what_bounds_a_step_are_its_two_largest_terms(terms, words):
    """It said "then compute" whenever compute was not the first."""
    prediction = predict.Prediction("ok", "", step_time_s=10.0, terms_s=terms)
    assert explain.bound(prediction).startswith(f"bound by {words}")
    assert explain.bound(prediction).endswith("the step") == (len(terms) == 2)


@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "seq", "gbs", "precision"),
    [
        ("llama31_405b", "h100", 1024, 8192, 512, "fp8cs"),
        ("qwen3_30b_a3b", "gb200", 64, 4096, 512, "bf16"),
        ("deepseek_v3", "h100", 512, 4096, 1024, "fp8bw"),
        ("nemotronh_56b", "b200", 64, 8192, 192, "bf16"),
    ],
)
@pytest.mark.slow
def test_sampled_layouts_cost_what_the_scalar_model_says(run, model, gpu, gpus, seq, gbs, precision):
    result = search.search(run(model, gpu, gpus, seq, gbs, precision))
    drawn = random.Random(0).sample(range(len(result)), min(250, len(result)))
    jobs = [result.job_at(i) for i in drawn]
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
    space = Space(tp=DEGREES["tp"], cp=DEGREES["cp"], mbs=DEGREES["mbs"], max_vp=4, sharding=("zero1",))
    space = Space(**{**vars(space), "fixed": {"recompute": "none"}})
    result = search.search(base, space)
    mine = {result.layout(i) for i in range(len(result)) if result.fields["pp"][i] in DEGREES["pp"]}
    mine = {x for x in mine if x.vp in DEGREES["vp"] and not x.embedding_as_layer and not x.loss_as_layer}
    mine = {x for x in mine if x.chunks is None}  # the rules here deal layers evenly
    every = (Layout(**dict(zip(DEGREES, values, strict=True)), gbs=24) for values in product(*DEGREES.values()))
    legal = {x for x in every if not legality.violations(base.replace(layout=x))}
    assert {x.replace(etp=None) for x in mine} == legal
    assert legal


@pytest.mark.parametrize(
    ("model", "gpus", "gbs", "stages"),
    [("gemma2_27b", 128, 256, "Et*3|(t*3|)*14tL"), ("llama4_scout", 64, 512, "Et*6|(t*7|)*3(t*6|)*3t*3L")],
)
def test_stages_written_out_are_offered_where_they_win(run, model, gpus, gbs, stages):
    """A wide head behind the last stage takes the time of layers, which the other stages hold."""
    result = search.search(run(model, gpus=gpus, gbs=gbs, seq=4096))
    best = result.job_at(int(result.ranked[0]))
    evenly = next(int(i) for i in result.ranked if result.layout(int(i)).chunks is None)
    assert best.layout.chunks is not None
    assert result.seconds[evenly] > 1.005 * result.seconds[result.ranked[0]]
    assert pipeline_layout.from_job(best) == stages
    assert any(stages in line for line in explain.explain_layout(result, int(result.ranked[0])))
    assert plans.described(best)["pipeline_layout"] == stages


def test_no_stages_are_written_out_where_even_ones_are_as_good(run):
    result = search.search(run("llama31_405b", gpus=512))
    assert all(split.chunks is None for split in result.splits)


def test_what_is_ranked_fits_and_the_fastest_comes_first(run):
    result = search.search(run("llama3_70b", gpus=64))
    assert len(result.ranked)
    over = result.reserved[result.ranked] > result.cap  # tensors alone fit: tight, and last
    assert result.tight[result.ranked][over].all()
    assert (np.diff(over.astype(int)) >= 0).all()
    tight = result.reserved[result.ranked] > 0.995 * result.cap
    assert 0 < tight.sum() < len(tight)
    assert (np.diff(tight.astype(int)) >= 0).all()  # those without room come last
    for part in (~tight, tight & ~over):
        seconds = result.seconds[result.ranked[part]]
        assert (np.diff(seconds) > -0.002 * seconds[1:]).all()
        assert seconds[0] <= result.seconds[result.ranked[part]].min() * 1.002


def test_a_layout_without_room_is_called_tight(run):
    result = search.search(run("llama3_8b", gpus=16, gbs=512))
    tight = next(int(i) for i in result.ranked if result.reserved[i] > 0.995 * result.cap)
    faster = result.seconds[tight] < result.seconds[result.ranked].max()
    assert faster  # it is not the slowest, and still last
    assert any(line.startswith("tight: 0.") for line in explain.explain_layout(result, tight))
    assert not any(line.startswith("tight") for line in explain.explain_layout(result, int(result.ranked[0])))


def test_of_layouts_as_fast_the_simpler_comes_first(run):
    """Equal to 0.1 %: no virtual or uneven stages and no recomputation without a gain."""
    result = search.search(run("llama3_8b", gpus=16, gbs=512))
    roomy = [int(i) for i in result.ranked if not result.tight[i]]
    names = ("tp", "pp", "vp", "cp", "ep", "sharding")

    def parts(i):
        layout, recompute = result.layout(i), result.fields["recompute_option"][i] > 0
        return sum(int(result.fields[name][i]) for name in names) + 4 * bool(layout.chunks) + 2 * recompute

    bins = np.round(np.log(result.seconds) * 1000)
    neighbours = [(a, b) for a, b in pairwise(roomy) if bins[a] == bins[b]]
    assert len(neighbours) > 100
    assert all(parts(a) <= parts(b) for a, b in neighbours)


def test_megatron_fsdp_is_ranked_only_when_it_is_fixed(run):
    job = run("llama3_8b", gpus=16, gbs=512)
    result = search.search(job)
    assert {result.layout(int(i)).sharding for i in result.ranked} == {"none", "zero1"}
    assert not any("Megatron-FSDP" in line for line in explain.explain_layout(result, int(result.ranked[0])))
    fixed = search.search(job, Space(fixed={"sharding": "zero3"}))
    assert {fixed.layout(int(i)).sharding for i in fixed.ranked} == {"zero3"}
    assert explain.UNMEASURED_NOTE in explain.explain_layout(fixed, int(fixed.ranked[0]))


def test_a_smaller_cap_never_finds_a_faster_layout(run):
    job = run("llama3_70b", gpus=64)
    best = [f.seconds[f.ranked[0]] for f in (search.search(job, memory_cap_gib=cap) for cap in (70, 50, 40))]
    assert best == sorted(best)


def test_what_nearly_fits_is_measured_against_the_cap(run):
    result = search.search(run("llama3_70b", gpus=64, gbs=128), memory_cap_gib=50)
    lines = explain.near_misses(result)
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
        ({"gpus": 64, "fixed": {"tp": 3}}, "with tp=3: tp 3 x pp 1 x cp 1 = 3 must divide the number of GPUs"),
        ({"gpus": 8, "fixed": {"pp": 64}}, "with pp=64: tp 1 x pp 64 x cp 1 = 64 must divide"),
        ({"gpus": 8, "fixed": {"vp": 7}}, "with vp=7"),
        ({"gpus": 64, "fixed": {"tq": 3}}, "the search cannot fix the layout key 'tq'"),
    ],
)
def test_what_cannot_be_searched_is_said(run, change, says):
    fixed = change.pop("fixed", {})
    with pytest.raises(UserError, match=says):
        search.search(run(**change), Space(fixed=fixed))


@pytest.mark.parametrize(
    ("model", "change", "says"),
    [
        ("gemma2_9b", {"seq": 8192}, "seq 8192 exceeds the attention window of gemma2_9b, 4096 tokens"),
        ("deepseek_v2_lite", {"options": Options(impl="local")}, "multi-latent attention requires"),
    ],
)
def test_a_rule_that_every_layout_breaks_is_named_instead_of_the_batch_size(run, model, change, says):
    with pytest.raises(UserError, match=says) as refused:
        search.search(run(model, gpus=8).replace(**change))
    assert "gbs" not in refused.value.hint


def test_whatever_is_found_is_legal():
    """With a batch that the GPUs divide there is always a layout: data parallelism alone."""
    verdicts: list[tuple[int, bool]] = []

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(
        gpus=st.integers(1, 96),
        steps=st.integers(1, 8),
        rest=st.sampled_from([0, 0, 0, 1]),
        seq=st.integers(1, 5000),
        layers=st.integers(1, 13),
        heads=st.sampled_from([1, 2, 6, 8]),
    )
    def drawn(gpus: int, steps: int, rest: int, seq: int, layers: int, heads: int) -> None:
        node = hardware.node("h100")
        model = models.ModelShape.from_shape(layers=layers, hidden=64 * heads, heads=heads, ffn=256 * heads, vocab=1000)
        fabric, layout = hardware.builtin().fabric_of(node), Layout(gbs=gpus * steps + rest)
        verdicts.append((rest, legal_throughout(PlannedJob(model, node, fabric, gpus, seq, "bf16", layout))))

    drawn()
    assert all(legal for rest, legal in verdicts if not rest)
    assert sum(legal for _, legal in verdicts) >= 10


def legal_throughout(job) -> bool:
    """Whether there is a layout; those drawn from all that there are must be legal."""
    try:
        result = search.search(job)
    except UserError:
        return False
    assert len(result)
    for i in random.Random(1).sample(range(len(result)), min(20, len(result))):
        assert legality.violations(result.job_at(i)) == []
    assert np.isfinite(result.seconds).all()
    assert (result.seconds > 0).all()
    assert (result.reserved > 0).all()
    return True


def test_what_no_layout_can_change_is_named():
    wanted = "no layout of deepseek_v2_lite on 64 GPUs is legal: .* only unfused attention"
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
    assert error.value.hint == "use a different GPU, or set attention unfused"


def test_a_dense_model_is_told_that_it_has_no_experts_to_overlap(run):
    job = run("llama3_8b", gpus=8)
    with pytest.raises(UserError, match="overlap_experts requires ep > 1") as error:
        search.search(job.replace(options=replace(job.options, overlap_experts=True)))
    assert "overlap_experts" in error.value.hint


def test_a_faster_layout_that_is_tight_is_called_so(run):
    """With room for 20 GiB only TP8 leaves some: TP4 PP2 is faster, and comes after it."""
    result = search.search(run("llama3_8b", gpus=8, gbs=512), memory_cap_gib=20)
    first = int(result.ranked[0])
    line = explain.faster_layouts(result)[0]
    assert re.fullmatch(
        r"TP4 PP2 .* would be \d\d\.\d% faster, but is tight: only 0\.0\d of 20\.0 GiB are free, less than 0\.5%; "
        r"to plan it: --layout tp=4,pp=2\S*",
        line,
    )
    assert not any("faster" in line for line in explain.explain_layout(result, first))


def test_micro_batches_of_three_and_six_are_searched(run):
    result = search.search(run("llama3_8b", gpus=8, gbs=96))
    assert {3, 6} <= set(result.fields["mbs"])


@pytest.mark.parametrize(("cap", "enough"), [(5.0, False), (9.0, True)])
def test_what_does_not_fit_is_told_more_gpus_only_where_no_option_is_enough(run, cap, enough):
    job = run("llama3_8b", gpus=8, gbs=512, tp=8, sp=True, recompute="full", sharding="none")
    job = job.replace(options=replace(job.options, memory_cap=cap))
    advice = suggestions.describe_shortage(job, predict.one(job), suggestions.advise_more_memory(job))
    more = f"no single change is enough: use more GPUs or raise the memory cap of {cap:g} GiB"
    assert (more in advice) == (not enough)
    assert predict.one(job).verdict == "oom"
    offloaded = job.replace(options=replace(job.options, offload=1.0))
    assert (predict.one(offloaded).verdict == "ok") == enough
