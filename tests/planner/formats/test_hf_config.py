"""A config.json is read once, into one value, whatever spelling and defaults its architecture has."""

import pytest

from superpod.errors import UserError
from superpod.planner.formats.hf_config import (
    InconsistentConfigError,
    decoder_keys,
    parse_config,
    to_transformers4_keys,
)
from superpod.planner.formats.hf_families import FAMILIES

LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ({"rope_theta": 1.0}, {"rope_theta": 1.0}),
        ({"rope_parameters": None}, {"rope_parameters": None}),
        ({"rope_parameters": {"rope_theta": 5.0}}, {"rope_theta": 5.0, "rope_scaling": None}),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5.0, "partial_rotary_factor": 0.5}},
            {"rope_theta": 5.0, "partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 6.0, "rope_type": "linear", "factor": 8.0},
                                 "sliding_attention": {"rope_theta": 4.0}}},
            {"rope_theta": 6.0, "rope_local_base_freq": 4.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "default"}}},
            {"rope_scaling": None},
        ),
        (  # the older spelling of the same, and a type that scales nothing
            {"rope_scaling": {"type": "linear", "factor": 8.0}, "rope_parameters": LINEAR},
            {"rope_scaling": LINEAR},
        ),
        ({"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 5.0}},
         {"rope_theta": 5.0, "rope_scaling": None}),
    ],
)  # fmt: skip
def test_newer_keys_become_older_ones(given, becomes):
    new = to_transformers4_keys(given)
    assert {key: value for key, value in new.items() if key != "rope_parameters" or value is None} == becomes


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rope_theta": 4.0, "rope_parameters": {"rope_theta": 5.0}}, r"rope_theta is 4\.0, but 5\.0 in"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 8.0}},
         "rope_scaling is"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "type 'yarn' for layers"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(given, says):
    with pytest.raises(InconsistentConfigError, match=says):
        to_transformers4_keys(given)


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 320}


def parsed(kind, layers=4, **keys):
    config = {**SIZES, "num_hidden_layers": layers, "model_type": kind, **keys}
    return parse_config(decoder_keys(config, "config.json"), "config.json", default_sizes=True)


@pytest.mark.parametrize(
    ("kind", "keys", "window", "windowed"),
    [
        ("llama", {"sliding_window": 8}, 0, [0, 0, 0, 0]),
        ("mistral", {}, 4096, [1, 1, 1, 1]),
        ("mistral", {"sliding_window": None}, 0, [0, 0, 0, 0]),
        ("qwen2", {"sliding_window": 8}, 0, [0, 0, 0, 0]),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, 8, [0, 0, 0, 1]),
        ("gemma2", {}, 4096, [1, 0, 1, 0]),
        ("gemma2", {"layer_types": ["full_attention", *["sliding_attention"] * 3]}, 4096, [0, 1, 1, 1]),
        ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2}, 8, [1, 0, 1, 0]),
    ],
)
def test_windows_are_those_of_the_architecture(kind, keys, window, windowed):
    c = parsed(kind, **keys)
    assert (c.window, [int(on) for on in c.windowed]) == (window, windowed)


def test_sizes_of_experts_have_defaults_only_where_they_are_asked_for():
    config = {**SIZES, "num_hidden_layers": 4, "model_type": "mixtral"}
    assert parsed("mixtral").experts == 8
    with pytest.raises(UserError, match="is missing"):
        parse_config(config, "config.json")


def test_an_architecture_s_own_names_are_read_and_named():
    gpt = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 10, "model_type": "gpt2"}
    c = parse_config(gpt, "config.json")
    assert (c.layers, c.hidden, c.ffn, c.heads) == (2, 64, 256, 4)
    with pytest.raises(UserError, match="n_head is missing"):
        parse_config({key: value for key, value in gpt.items() if key != "n_head"}, "config.json")


@pytest.mark.parametrize("kind", FAMILIES)
def test_absent_keys_mean_what_they_mean_to_transformers(kind):
    transformers = pytest.importorskip("transformers")
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("transformers has no such architecture")
    config = transformers.AutoConfig.for_model(kind).get_text_config()
    family = FAMILIES[kind]
    unequal = {
        key: (value, getattr(config, key))
        for key, value in {**family.defaults, **family.default_sizes}.items()
        if hasattr(config, key) and getattr(config, key) != value
    }
    for key in ("sliding_window", "head_dim", "hidden_activation"):  # transformers computes these from other keys
        if key in unequal and None in unequal[key]:
            del unequal[key]
    assert unequal == {}
