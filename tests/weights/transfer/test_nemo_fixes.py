"""Corrections of NeMo's attention classes in a built model."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from superpod.weights.transfer import nemo_fixes


@pytest.fixture
def broken(monkeypatch):
    """NeMo's two classes that `mended` mends, and Megatron's rule of windows."""
    torch = pytest.importorskip("torch")
    from tests.weights import nemo_stubs

    nemo_stubs.install(monkeypatch)
    monkeypatch.setattr(nemo_fixes.post_norms, "set_epsilon", lambda core: None)

    class Attention(torch.nn.Module):
        def forward(self, *args, **kwargs):
            return args, kwargs

    gemma2: Any = ModuleType("gemma2")
    gemma3: Any = ModuleType("gemma3")
    gemma2.Gemma2DotProductAttention = type("Gemma2DotProductAttention", (Attention,), {})
    gemma3.Gemma3SelfAttention = type("Gemma3SelfAttention", (Attention,), {})
    package: Any = ModuleType("nemo.collections.llm.gpt.model")
    package.gemma2, package.gemma3 = gemma2, gemma3
    monkeypatch.setitem(sys.modules, package.__name__, package)
    return torch, gemma2.Gemma2DotProductAttention, gemma3.Gemma3SelfAttention


@pytest.mark.parametrize(
    ("skips", "number", "own", "on"),
    [([1, 0], 1, None, True), ([1, 0], 2, (7, 0), False), (None, 1, None, False), (None, 2, (7, 0), True)],
)
def test_gemma2s_windows_are_where_the_configuration_says(broken, skips, number, own, on):
    torch, gemma2, _ = broken
    attention = gemma2()
    attention.config = SimpleNamespace(window_attn_skip_freq=skips, window_size=[7, 0])
    attention.layer_number, attention.window_size = number, own
    core = torch.nn.Sequential(attention)
    nemo_fixes.apply_fixes(core)
    nemo_fixes.apply_fixes(core)  # changes nothing
    assert attention.window_size == ((7, 0) if on else None)
    query, key = torch.zeros(5, 1), torch.zeros(6, 1)
    (_, _, _, mask, last), _ = attention(query, key, key, None, "last")
    assert last == "last"
    if on:
        assert (mask.shape, mask.dtype, mask.any().item()) == ((1, 1, 5, 6), torch.bool, False)
        assert len(attention._forward_pre_hooks) == 1
    else:
        assert mask is None
    given = torch.ones(1)
    assert attention(query, key, key, given)[0][3] is given
    assert len(attention(query, key, key)[0]) == 3


def test_gemma3_is_not_given_an_argument_that_it_does_not_take(broken):
    torch, _, gemma3 = broken
    attention = gemma3()
    nemo_fixes.apply_fixes(torch.nn.Sequential(attention, torch.nn.Identity()))
    assert attention(1, rotary_pos_cos_sin=None, x=2) == ((1,), {"x": 2})
    assert attention(1, rotary_pos_cos_sin=3) == ((1,), {"rotary_pos_cos_sin": 3})
    assert attention(1) == ((1,), {})
