"""What is taken from a checkpoint: its base, Megatron's own module, its tensors' plain names, merged adapters."""

import json
import os
from types import SimpleNamespace
from typing import Any

import pytest

from superpod.errors import UserError
from superpod.weights.transfer import load

torch = pytest.importorskip("torch", reason="torch: [nemo] extra")
from tests.weights import nemo_stubs  # noqa: E402


@pytest.fixture(autouse=True)
def stubs(monkeypatch):
    nemo_stubs.install(monkeypatch)


def test_the_base_of_an_adapter(tmp_path):
    assert load.find_base_checkpoint(tmp_path) is None
    metadata = tmp_path / "weights" / "adapter_metadata.json"
    metadata.parent.mkdir()
    metadata.write_text("{}")
    with pytest.raises(UserError, match="is corrupt"):
        load.find_base_checkpoint(tmp_path)
    metadata.write_text(json.dumps({"model_ckpt_path": str(tmp_path / "base")}))
    with pytest.raises(UserError, match="which does not exist"):
        load.find_base_checkpoint(tmp_path)
    (tmp_path / "base" / "weights").mkdir(parents=True)
    assert load.find_base_checkpoint(tmp_path) == tmp_path / "base"


def test_megatrons_module_is_inside_of_all_wrappers():
    inner = torch.nn.Linear(2, 2)
    wrapped = torch.nn.Module()
    wrapped.module = torch.nn.Module()
    wrapped.module.module = inner
    assert load.unwrap_model(wrapped) is load.unwrap_model(inner) is inner


def test_the_attention_that_a_recipe_chose_is_forgotten(monkeypatch):
    for kind in ("FLASH", "FUSED", "UNFUSED"):
        monkeypatch.setenv(f"NVTE_{kind}_ATTN", "1")
    monkeypatch.setenv("NVTE_DEBUG", "1")
    load.unset_attention_backend()
    assert [name for name in os.environ if name.startswith("NVTE_")] == ["NVTE_DEBUG"]


@pytest.mark.parametrize(("dtype", "bf16", "fp16"), [("bfloat16", True, False), ("float16", False, True),
                                                     ("float32", False, False)])  # fmt: skip
def test_nothing_of_the_training_is_left(dtype, bf16, fp16):
    config: Any = SimpleNamespace(
        fp8="hybrid", fp8_param=True, perform_initialization=True, recompute_granularity="full",
        sequence_parallel=True, tp_comm_overlap=True, pipeline_model_parallel_layout="Et|L",
    )  # fmt: skip
    load._reset_training_settings(config, getattr(torch, dtype))
    assert vars(config) == {
        "params_dtype": getattr(torch, dtype), "pipeline_dtype": getattr(torch, dtype),
        "autocast_dtype": getattr(torch, dtype), "bf16": bf16, "fp16": fp16, "fp8": None, "fp8_param": False,
        "perform_initialization": False, "recompute_granularity": None, "sequence_parallel": False,
        "tp_comm_overlap": False, "pipeline_model_parallel_layout": None,
    }  # fmt: skip


def numbers(layer, values):
    layer.weight.data = torch.tensor(values)
    return layer


def adapted(cls=nemo_stubs.LoRALinear, magnitude=None):
    """W = [[1, 0], [0, 1]], B A = [[1], [2]] [[3, 4]] = [[3, 4], [6, 8]], scaled by alpha / dim = 2."""
    adapter = nemo_stubs.Adapter(2, 2, 1, 2, magnitude)
    numbers(adapter.linear_in, [[3.0, 4]])
    numbers(adapter.linear_out, [[1.0], [2]])
    model = torch.nn.Module()
    model.plain = torch.nn.Linear(2, 2)
    model.linear = cls(numbers(torch.nn.Linear(2, 2, bias=False), [[1.0, 0], [0, 1]]), adapter)
    return model


def test_lora_adds_its_scaled_product():
    model = adapted()
    assert load.merge_adapters(model) == 1
    assert model.linear.to_wrap.weight.tolist() == [[7, 8], [12, 17]]


def test_dora_gives_each_row_its_magnitude():
    """arXiv:2402.09353: m (W + s B A) / ||W + s B A||, row by row; 113 = 49 + 64, 433 = 144 + 289."""
    model = adapted(nemo_stubs.DoRALinear, torch.tensor([113.0**0.5, 2 * 433**0.5]))
    assert load.merge_adapters(model) == 1
    torch.testing.assert_close(model.linear.to_wrap.weight.data, torch.tensor([[7.0, 8], [24, 34]]))


def test_every_expert_of_a_grouped_layer_gets_the_product():
    model = adapted()
    grouped = torch.nn.Module()
    grouped.weight0, grouped.weight1 = (torch.nn.Parameter(torch.full((2, 2), float(n))) for n in range(2))
    grouped.num_gemms = 2
    model.linear.to_wrap = grouped
    assert load.merge_adapters(model) == 2
    assert grouped.weight0.tolist() == [[6, 8], [12, 16]]
    assert grouped.weight1.tolist() == [[7, 9], [13, 17]]


def test_adapted_layers_have_their_names_and_those_behind_a_norm_are_refused():
    model = adapted()
    assert [(name, layer) for name, layer in load.find_adapted_layers(model)] == [("linear", model.linear)]
    model.linear.to_wrap.post_layernorm = torch.nn.Identity()
    with pytest.raises(UserError, match="adapter of linear was applied after the norm"):
        load.find_adapted_layers(model)


def test_the_tensors_have_the_names_of_a_model_without_adapters():
    model = adapted()
    model.register_buffer("core_extra_state", torch.zeros(1))
    model.register_buffer("x_extra_state", None)
    state = load.get_base_state_dict(model)
    assert state.keys() == {"plain.weight", "plain.bias", "linear.weight"}
    assert state["linear.weight"].tolist() == [[1, 0], [0, 1]]
