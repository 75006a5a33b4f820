"""A recipe takes a folder's numbers over, and refuses another shape."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from superpod.errors import UserError
from superpod.weights.families import match_config, nemo_class, nemo_config
from superpod.weights.transfer import conversion


@dataclass
class Fields:
    """A recipe's configuration of its model."""

    num_layers: int = 2
    rotary_base: float = 1e4
    activation_func: str = "silu"
    bias_activation_fusion: bool = True
    multi_latent_attention: bool = False
    kv_channels: int = 16
    window_attn_skip_freq: object = None
    window_size: object = None
    params_dtype: str = "bf16"


class Theirs:
    pass


class Ours(Theirs):
    pass


@pytest.fixture
def matched(monkeypatch):
    """Match a recipe with `length` tokens a sequence to a folder of a model with these fields."""
    pytest.importorskip("torch")
    from tests.weights import nemo_stubs

    nemo_stubs.install(monkeypatch)
    module: Any = ModuleType("fiddle")
    module.get_callable = lambda model: model.cls
    module.build = lambda config: Fields(**vars(config))
    monkeypatch.setitem(sys.modules, "fiddle", module)

    def match(cls=Ours, length=8, model="M", extra=None, ours=None, **fields):
        monkeypatch.setattr(conversion, "check_folder", lambda folder: nemo_class.NemoClass(model, "C", {}))
        monkeypatch.setattr(nemo_config, "get_model_class", lambda nearest: Theirs)
        source = Fields(**fields)
        vars(source).update(extra or {})
        monkeypatch.setattr(nemo_config, "build_config", lambda nearest, dtype: source if dtype == "bf16" else None)
        partial: Any = SimpleNamespace(
            model=SimpleNamespace(cls=cls, config=SimpleNamespace(**ours or {})),
            data=SimpleNamespace(seq_length=length),
        )
        return match_config.match_config(partial, Path("HF")), vars(partial.model.config)

    return match


def test_a_recipe_takes_over_the_folders_numbers(matched):
    assert matched() == ([], {})
    changes, config = matched(rotary_base=5e5, activation_func="gelu", bias_activation_fusion=False)
    assert sorted(changes) == [("activation_func", "silu", "gelu"), ("rotary_base", 1e4, 5e5)]
    assert config == {"rotary_base": 5e5, "activation_func": "gelu", "bias_activation_fusion": False}
    assert matched(rotary_base=5e5, bias_activation_fusion=False)[1] == {"rotary_base": 5e5}


def test_another_shape_class_or_field_is_refused(matched):
    with pytest.raises(UserError, match="num_layers is 2 instead of 3"):
        matched(num_layers=3)
    with pytest.raises(UserError, match="Theirs, but the recipe trains a Fields"):
        matched(cls=Fields)
    with pytest.raises(UserError, match="Theirs, but the recipe trains a named"):
        matched(cls=named)
    with pytest.raises(UserError, match="HF has qk_l2_norm True, which the recipe's Fields does not support"):
        matched(extra={"qk_l2_norm": True})


def named():
    """A function in place of a class."""


@pytest.mark.parametrize(
    ("model", "length", "window", "refused"),
    [("Gemma2Model", 8, [7, 0], False), ("Gemma2Model", 9, [7, 0], True), ("Gemma2Model", 9, None, False),
     ("M", 9, [7, 0], False)],
)  # fmt: skip
def test_gemma2_trains_within_its_window(matched, model, length, window, refused):
    given = {"window_size": window} if window else None
    if refused:
        with pytest.raises(UserError, match="sequences of 9 tokens exceed the model's sliding window of 8") as no:
            matched(model=model, length=length, window_size=window, ours=given)
        assert no.value.hint == "set data.seq_length=8"
        return
    assert matched(model=model, length=length, window_size=window, ours=given)[0] == []
