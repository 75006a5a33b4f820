"""Shrinking, over many recipes and drawn layouts: the result is legal, small, and of the same topology."""

from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from superpod.collection import recipe_job as jobs
from superpod.collection.registry import recipes
from superpod.errors import UserError
from superpod.planner import hardware, legality, models
from superpod.planner.layout import Layout
from superpod.planner.models import Split
from superpod.planner.planned_job import PlannedJob
from superpod.rehearsal import RehearsalError
from superpod.rehearsal.training.shrink import RANKS, shrink
from superpod.requests.request import Request

DEGREES = ("tp", "pp", "cp", "ep")


@cache
def sizes():
    """Every (recipe, nodes)."""
    return [(name, nodes) for name, recipe in recipes().items() for nodes in recipe.nodes]


def lengths(job):
    """Layers of each chunk."""
    return [len(chunk) for chunk in Split.from_layout(job.layout).chunk_layers(job.model.layers)]


def check(old, small, ranks=RANKS):
    """What every shrunk job keeps."""
    assert legality.violations(small) == []
    assert small.gpus <= ranks
    for name in DEGREES:
        was, now = getattr(old.layout, name), getattr(small.layout, name)
        assert min(was, 2) <= now <= was, name
    assert (old.layout.vp is None) == (small.layout.vp is None)
    assert small.layout.sp == old.layout.sp
    assert small.layout.recompute == old.layout.recompute
    kept = ("experts", "shared_ffn", "kv_lora", "q_lora", "window", "positions", "mtp_layers", "dense_first", "ffn")
    for name in kept:
        assert bool(getattr(old.model, name)) == bool(getattr(small.model, name)), name
    assert (old.model.heads > old.model.groups) == (small.model.heads > small.model.groups)
    assert small.model.kinds == old.model.kinds
    assert small.model.tied == old.model.tied
    assert small.model.total_parameters() < 10_000_000
    own, now = old.layout.micro_batches(old.gpus), small.layout.micro_batches(small.gpus)
    assert min(own, 2) <= now <= max(own, small.layout.pp)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_recipe(data):
    name, nodes = data.draw(st.sampled_from(sizes()))
    old = jobs.job(recipes()[name], nodes)
    try:
        shrunk = shrink(old)
    except RehearsalError as refused:
        assert old.model.name in str(refused)  # noqa: PT017 - a refusal is one of two right answers
        assert old.model.pattern or old.model.runs or {"mamba", "delta"} & old.model.kinds
        return
    check(old, shrunk.job)
    if len(set(lengths(old))) > 1 and len(lengths(shrunk.job)) > 2:  # of two stages, the first and the last are alike
        assert len(set(lengths(shrunk.job))) > 1, "uneven stages became even"


FEATURES = ("llama3_8b", "llama32_1b", "gemma_2b", "gpt3_175b", "mixtral_8x7b", "qwen3_235b_a22b", "deepseek_v3")


@settings(max_examples=200, deadline=None)
@given(
    model=st.sampled_from(FEATURES),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 3, 4, 6, 8]),
    vp=st.sampled_from([None, 2, 3, 4]),
    cp=st.sampled_from([1, 2, 4]),
    ep=st.sampled_from([1, 2, 8]),
    dp=st.integers(1, 8),
    micro=st.integers(1, 16),
    ranks=st.integers(8, 24),
)
def test_any_layout(model, tp, pp, vp, cp, ep, dp, micro, ranks):
    node = hardware.builtin().node("h100")
    layout = Layout(tp=tp, pp=pp, vp=vp, cp=cp, ep=ep, sp=tp > 1, gbs=dp * micro, recompute="full")
    old = PlannedJob(
        models.find(model), node, hardware.builtin().fabric_of(node), tp * pp * cp * dp, 8192, "bf16", layout
    )
    assume(not legality.violations(old))
    try:
        small = shrink(old, ranks).job
    except RehearsalError as refused:
        least = [min(2, degree) for degree in (tp, pp, cp)]
        assert least[0] * least[1] * least[2] * min(2, ep) > ranks, refused  # noqa: PT017 - as above
        return
    check(old, small, ranks)


def test_a_layout_that_fits_is_not_folded():
    shrunk = shrink(jobs.job(recipes()["llama3_8b_pretrain_a100_bf16"]), 8)
    assert [degree.name for degree in shrunk.folded] == ["dp"]
    assert "TP2" in shrunk.topology


def test_folding_is_reported():
    shrunk = shrink(jobs.job(recipes()["llama31_405b_pretrain_a100_bf16"], 64))
    assert "folded: TP 8 -> 2, PP 16 -> 2, VP 8 -> 2" in shrunk.topology
    assert ("hidden", 16384) in [(size.name, size.old) for size in shrunk.sizes]


def test_too_few_ranks_are_refused_with_the_number_that_does():
    with pytest.raises(RehearsalError, match="needs 8 ranks") as refused:
        shrink(jobs.job(recipes()["llama31_405b_pretrain_a100_bf16"], 64), 4)
    assert "--ranks 8" in refused.value.hint


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mamba2_8b_pretrain_h100_bf16", "Mamba"),
        ("bert_340m_pretrain_a100_bf16", "only with Transformer Engine"),
        ("llama33_nemotron_super_49b_sft_h100_bf16", "different widths"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_by_name(name, why):
    from superpod.rehearsal import rehearsal_run

    with pytest.raises(UserError, match=f"{name.partition('_')[0]}.*{why}"):
        rehearsal_run.plan_rehearsal(Request(name))
