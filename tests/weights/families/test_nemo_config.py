"""Which configurations of NeMo compute the same function, and which do not."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from superpod.errors import UserError
from superpod.weights.families import export_config, nemo_config
from superpod.weights.families.nemo_class import NemoClass, find_nemo_class
from tests.weights import tiny
from tests.weights.families.test_families import READ

torch = pytest.importorskip("torch", reason="torch: [nemo] extra")
from tests.weights import nemo_stubs  # noqa: E402


@pytest.fixture(autouse=True)
def stubs(monkeypatch):
    nemo_stubs.install(monkeypatch)


def config(**fields) -> Any:
    base = {"multi_latent_attention": False, "kv_channels": 16, "num_query_groups": 2, "num_layers": 4,
            "window_size": None, "window_attn_skip_freq": None, "vocab_size": 320}  # fmt: skip
    return SimpleNamespace(**base | fields)


ALL = nemo_config.SHAPE_FIELDS + nemo_config.VALUE_FIELDS


def differ(right, other):
    return [name for name, *_ in nemo_config.find_differences(config(**right), config(**other), ALL)]


@pytest.mark.parametrize(
    ("right", "other", "names"),
    [
        ({}, {}, []),
        ({"num_query_groups": 4}, {}, ["num_query_groups"]),
        ({"multi_latent_attention": True, "num_query_groups": 4, "kv_channels": 9}, {}, ["multi_latent_attention"]),
        ({"hidden_size": 64}, {}, ["hidden_size"]),
        ({"rotary_base": 1e4}, {"rotary_base": 5e5}, ["rotary_base"]),
        # Llama 3.1's scaling by 1 is none
        ({}, {"scale_factor": 1.0, "low_freq_factor": 1, "high_freq_factor": 4, "old_context_len": 8}, []),
        ({}, {"scale_factor": 8.0, "low_freq_factor": 1}, ["scale_factor"]),
        ({"scale_factor": 8.0, "low_freq_factor": 2}, {"scale_factor": 8.0, "low_freq_factor": 1},
         ["low_freq_factor"]),
        ({"scale_factor": 8.0}, {}, ["scale_factor"]),
        # softmax scale: 16 ** -0.5 = 0.25
        ({"softmax_scale": None}, {"softmax_scale": 0.25}, []),
        ({"softmax_scale": 0.25}, {"softmax_scale": None}, []),
        ({"softmax_scale": 0.25}, {"softmax_scale": 0.25000001}, []),
        ({"softmax_scale": 0.25}, {"softmax_scale": 0.2501}, ["softmax_scale"]),
        ({"softmax_scale": 0.25, "kv_channels": None}, {"softmax_scale": 0.25, "kv_channels": None}, []),
        # lists and tuples, one group or none, functions of one name
        ({"rotary_base": (1, 2)}, {"rotary_base": [1, 2]}, []),
        ({"rotary_base": (1, 2)}, {"rotary_base": [2, 1]}, ["rotary_base"]),
        ({"moe_router_num_groups": 1}, {"moe_router_num_groups": None}, []),
        ({"moe_router_num_groups": 2}, {"moe_router_num_groups": None}, ["moe_router_num_groups"]),
        ({"moe_router_group_topk": None}, {"moe_router_group_topk": 1}, []),
        ({"beta_fast": 1}, {"beta_fast": None}, ["beta_fast"]),
        ({"activation_func": torch.relu}, {"activation_func": torch.nn.functional.gelu}, ["activation_func"]),
        ({"activation_func": torch.relu}, {"activation_func": torch.Tensor.relu}, []),
        # windows, however they are said
        ({"window_size": [7, 0], "window_attn_skip_freq": [1, 1, 1, 1]}, {"window_size": (7, 0)}, []),
        ({"window_size": [7, 0], "window_attn_skip_freq": [1, 0, 1, 0]}, {"window_size": [7, 0]},
         ["window_attn_skip_freq"]),
        ({"window_size": [7, 0], "window_attn_skip_freq": [1, 0, 1, 0]},
         {"window_size": [7, 0], "window_attn_skip_freq": 2}, []),
        ({}, {"window_attn_skip_freq": 2}, []),
    ],
)  # fmt: skip
def test_fields_that_compute_something_else_are_named(right, other, names):
    assert differ(right, other) == names


def test_a_difference_has_both_values():
    assert nemo_config.find_differences(config(qk_l2_norm=True), config(), ("qk_l2_norm",)) == [
        ("qk_l2_norm", True, None)
    ]


def test_gemma2s_class_has_its_windows_in_even_layers_unless_told():
    gemma = config(window_size=[7, 0], attn_logit_softcapping=50.0)
    assert nemo_config.list_windowed_layers(gemma) == [False, True, False, True]
    assert nemo_config.list_windowed_layers(config(window_size=[7, 0])) == [True] * 4
    assert nemo_config.list_windowed_layers(config()) == [False] * 4


@pytest.mark.parametrize(
    ("name", "fused", "at_one"),
    [("silu", True, 0.7311), ("gelu", False, 0.8413), ("gelu_tanh", False, 0.8412), ("relu", False, 1.0),
     ("relu2", False, 1.0)],
)  # fmt: skip
def test_only_silu_is_fused(name, fused, at_one):
    settings = nemo_config.get_settings(NemoClass("M", "C", {"activation_func": name, "x": 1}))
    assert settings.pop("bias_activation_fusion") is fused
    function = settings.pop("activation_func")
    assert function(torch.tensor(1.0)).item() == pytest.approx(at_one, abs=5e-5)
    assert function(torch.tensor(-3.0)).item() == pytest.approx(0, abs=0.2)
    assert function(torch.tensor(3.0)).item() == pytest.approx(9 if name == "relu2" else 3, abs=0.2)
    assert settings == {"x": 1}
    assert nemo_config.get_settings(NemoClass("M", "C", {"x": 1})) == {"x": 1}


@dataclass
class Fields:
    """A configuration class of NeMo's."""

    num_layers: int = 1
    params_dtype: Any = None
    bf16: bool = True
    fp16: bool = True
    kv_channels: int = 16
    multi_latent_attention: bool = False
    window_size: Any = None
    window_attn_skip_freq: Any = None
    vocab_size: int | None = 320


class Model:
    def __init__(self, config):
        self.config = config


def model_of(**fields) -> Any:
    return Model(Fields(**fields))


@pytest.fixture
def one_class(monkeypatch):
    monkeypatch.setattr(nemo_config, "get_model_class", lambda nearest: Model)


@pytest.mark.parametrize(("dtype", "bf16", "fp16"), [("bfloat16", True, False), ("float16", False, True),
                                                     ("float32", False, False)])  # fmt: skip
def test_a_configuration_is_built_in_one_number_format(one_class, dtype, bf16, fp16):
    made = nemo_config.build_config(NemoClass("Model", "Fields", {"num_layers": 3}), getattr(torch, dtype))
    assert (made.num_layers, made.params_dtype, made.bf16, made.fp16) == (3, getattr(torch, dtype), bf16, fp16)


def test_a_field_that_the_class_does_not_have_is_an_error(one_class):
    with pytest.raises(AttributeError, match="Fields has no field rope_scale"):
        nemo_config.build_config(NemoClass("Model", "Fields", {"rope_scale": 3}), torch.float32)


def test_a_model_must_match_its_configuration(one_class):
    said = NemoClass("Model", "Fields", {"num_layers": 3})
    nemo_config.require_match(said, model_of(num_layers=3))
    nemo_config.require_match(said, model_of(num_layers=3, vocab_size=None))
    with pytest.raises(UserError, match="num_layers is 4 instead of 3"):
        nemo_config.require_match(said, model_of(num_layers=4))
    with pytest.raises(UserError, match="vocab_size is 319 instead of 320"):
        nemo_config.require_match(said, model_of(num_layers=3, vocab_size=319))
    other: Any = object()
    with pytest.raises(UserError, match="the checkpoint is a object, but"):
        nemo_config.require_match(said, other)


OWN = {  # of NeMo's classes, where config.json does not decide them
    "gated_linear_unit": True, "add_bias_linear": False, "rotary_percent": 1.0, "seq_len_interpolation_factor": None,
    "num_moe_experts": None, "softmax_scale": None, "window_size": None, "window_attn_skip_freq": None,
    "moe_router_score_function": "softmax", "moe_router_pre_softmax": False,
}  # fmt: skip
CLASSES = {
    cls: type(cls, (), {"__init__": lambda self, config: setattr(self, "config", config)})
    for cls in ("LlamaModel", "MistralModel", "MixtralModel", "Qwen2Model", "Qwen3Model", "GemmaModel", "Gemma2Model",
                "Gemma3Model", "NemotronModel", "Phi3Model", "Starcoder2Model", "DeepSeekModel", "GPTOSSModel")
}  # fmt: skip
BACK = [name for name, (kind, *_) in READ.items() if kind not in ("granite", "smollm3", "seed_oss")]
BACK.remove("gemma2, no window")
"""The others have fields that the configuration of their class does not say; `must_match` refuses them."""


@pytest.mark.parametrize("name", BACK)
def test_what_was_read_is_written_as_it_was(name, monkeypatch):
    transformers = pytest.importorskip("transformers")
    kind, keys, fields = READ[name]
    class_ = find_nemo_class({**tiny.SIZES, "model_type": kind, **keys})
    settings = nemo_config.get_settings(class_)
    held = SimpleNamespace(**{**OWN, "multi_latent_attention": "kv_lora_rank" in fields, **settings})
    if not hasattr(held, "activation_func"):
        held.activation_func = None
    model = CLASSES[class_.model](held)
    monkeypatch.setattr(
        transformers.AutoConfig, "for_model", lambda kind, **keys: SimpleNamespace(model_type=kind, **keys)
    )
    ids = SimpleNamespace(tokenizer=SimpleNamespace(bos_token_id=5, eos_token_id=6))
    written = export_config.build_hf_config(model, ids)
    assert (written.bos_token_id, written.eos_token_id, written.pad_token_id) == (5, 6, None)
    again = find_nemo_class(vars(written))
    assert again.fields == fields
    assert (again.model, again.config, again.unknown) == (class_.model, class_.config, ())


def test_rows_of_the_embedding_are_counted_where_the_configuration_does_not_say(monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers.AutoConfig, "for_model", lambda kind, **keys: SimpleNamespace(**keys))
    held = nemo_config.get_settings(find_nemo_class({**tiny.SIZES, "model_type": "llama"}))
    model = CLASSES["LlamaModel"](SimpleNamespace(**{**OWN, "multi_latent_attention": False, **held,
                                                     "vocab_size": None}))  # fmt: skip
    monkeypatch.setattr(
        export_config.load, "get_base_state_dict", lambda m: {"embedding.word_embeddings.weight": torch.empty(384, 8)}
    )
    assert export_config.build_hf_config(model, object()).vocab_size == 384


def test_a_class_without_an_architecture_is_refused():
    with pytest.raises(UserError, match="NeMo's Model"):
        export_config.find_model_type(Model(None))


def test_gemma2_without_a_list_has_nemos_own_places():
    held = config(window_size=[7, 0], window_attn_skip_freq=None, num_layers=3)
    assert export_config._build_window_keys(held, "gemma2")["layer_types"] == [
        "full_attention", "sliding_attention", "full_attention",
    ]  # fmt: skip


def test_a_gemma3_without_a_scale_has_that_of_its_heads():
    assert export_config._build_gemma_keys(config(softmax_scale=None, kv_channels=256), "gemma3_text") == {
        "query_pre_attn_scalar": 256
    }


@pytest.mark.parametrize(("scale", "scalar"), [(256**-0.5, 256), (None, 128), (168.5**-0.5, 168.5)])
def test_gemma3_scalar_is_an_integer_where_it_can_be(scale, scalar):
    config = SimpleNamespace(softmax_scale=scale, kv_channels=128)
    keys = export_config._build_gemma_keys(config, "gemma3_text")
    assert keys == {"query_pre_attn_scalar": scalar}
    assert type(keys["query_pre_attn_scalar"]) is type(scalar)
