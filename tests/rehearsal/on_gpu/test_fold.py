"""Folding onto one GPU, over many recipes: the result is legal and has the shapes of one rank."""

from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from superpod.collection import recipe_job, registry
from superpod.planner import legality
from superpod.rehearsal import RehearsalError
from superpod.rehearsal.on_gpu import fold as folding
from superpod.rehearsal.on_gpu.fold import fold


@cache
def sizes():
    """Every (recipe, nodes)."""
    return [(name, nodes) for name, recipe in registry.recipes().items() for nodes in recipe.nodes]


def job(name, nodes=None):
    return recipe_job.job(registry.find(name), nodes)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_recipe_has_the_shapes_of_one_rank(data):
    name, nodes = data.draw(st.sampled_from(sizes()))
    old = job(name, nodes)
    try:
        new = fold(old)
    except RehearsalError:
        assume(False)
    assert legality.violations(new) == []
    assert (new.gpus, new.layout.model_parallel, new.layout.ep) == (1, 1, 1)
    assert new.seq * old.layout.cp == old.seq
    assert new.model.hidden == old.model.hidden
    if old.model.kv_lora:  # latent attention has its own sizes of heads
        heads = ("qk_nope_dim", "qk_rope_dim", "v_dim", "kv_lora", "q_lora")
        assert all(getattr(new.model, size) == getattr(old.model, size) for size in heads)
    else:
        assert new.model.channels == old.model.channels
    assert new.model.heads * old.layout.tp == old.model.heads
    assert new.model.ffn * old.layout.tp == old.model.ffn
    assert new.model.kinds == old.model.kinds
    assert new.layout.mbs == old.layout.mbs
    assert new.precision == old.precision
    assert new.layout.recompute == old.layout.recompute
    assert new.model.topk <= new.model.experts or not new.model.experts


def test_uses_as_many_layers_as_fit():
    old = job("llama3_8b_pretrain_h100_bf16")
    most = fold(old, limit_gib=75)
    assert 2 < most.model.layers < old.model.layers
    assert folding.predicted_gib(most) <= 75
    more = fold(old, layers=most.model.layers + 1)
    assert folding.predicted_gib(more) > 75
    assert fold(old, layers=4, limit_gib=75).model.layers == 4


def test_refuses_what_does_not_fit_even_with_the_fewest_layers():
    with pytest.raises(RehearsalError, match=r"with 2 layers needs \d+ GiB on one GPU, but 10 GiB are free"):
        fold(job("llama31_405b_pretrain_h100_bf16"), limit_gib=10)


def test_refuses_layers_that_need_other_packages():
    with pytest.raises(RehearsalError, match="Mamba"):
        fold(job("mamba2_8b_pretrain_h100_bf16"))
