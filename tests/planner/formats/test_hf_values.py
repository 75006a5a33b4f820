"""No value of a configuration passes that its key does not take: by one table, for every key that a reader reads."""

import ast
import json
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from superpod.errors import UserError
from superpod.planner.formats import hf_families, hf_values
from superpod.planner.formats.hf_shape import from_config
from superpod.weights.families.nemo_class import find_nemo_class
from tests.planner.formats.test_hf_shape import CONFIGS

ROOT = Path(__file__).parents[3]
FORMATS = ROOT / "src" / "superpod" / "planner" / "formats"
READERS = [
    *(FORMATS / name for name in ("hf_config.py", "hf_families.py", "hf_shape.py")),
    *(ROOT / "src" / "superpod" / "weights" / "families").glob("families_*.py"),
    ROOT / "src" / "superpod" / "weights" / "families" / "nemo_fields.py",
]
VALUES = ("c", "values", "llama", "c.values")
"""What readers call the keys of a config.json."""
HEADLESS = {"use_bidirectional_attention"}
"""Read only to be refused whatever it is."""

HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([10**9, 2**31, 2**63, 10**30, 10**400, -(10**400)]),
    st.sampled_from([math.nan, math.inf, -math.inf, 1e300, 5e-324, -0.0, 0.5, 4096.0]),
    st.sampled_from(["", "4096", "1e-5", "true", "none", "linear", "silu", "\x1b[2J", "x" * 500]),
    st.sampled_from([[], [1], ["sliding_attention"], [[]], {}, {"factor": 2}, {"rope_type": "linear"}]),
)


def read_keys(path: Path, names: tuple[str, ...]) -> set[str]:
    """Constant keys that a file reads of its variables `names`: name["key"], name.get("key"), size("key")."""
    keys: set[object] = set()
    calls = {"size", *(f"{name}.get" for name in names)}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) in names:
            keys |= {node.slice.value} if isinstance(node.slice, ast.Constant) else set()
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in calls:
            keys |= {arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)}
    return {key for key in keys if isinstance(key, str)}


def test_every_key_that_a_reader_reads_is_in_the_table():
    read = set().union(*(read_keys(path, VALUES) for path in READERS))
    for family in hf_families.FAMILIES.values():
        read |= {*family.keys, *family.names.values()}
        for named in filter(None, (family.windows, family.experts)):
            read |= {value for value in vars(named).values() if isinstance(value, str) and value}
    assert len(read) > 90
    assert read - hf_values.KEYS.keys() <= HEADLESS
    inner = set().union(*(read_keys(path, ("scaling", "rotary.scaling")) for path in READERS)) - hf_values.KEYS.keys()
    assert len(inner) > 8, inner
    assert inner <= hf_values.ROPE.keys()


def test_every_default_of_an_import_is_a_value_that_its_key_takes():
    compared = 0
    for kind, family in hf_families.FAMILIES.items():
        hf_values.check({**family.defaults, **family.default_sizes}, kind)
        compared += len(family.keys)
    assert compared > 150


def refusal(read):
    try:
        read()
    except UserError as refused:
        return str(refused)
    return ""


def written(folder: Path, config: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(CONFIGS)), st.sampled_from(sorted(hf_values.KEYS)), HOSTILE)
def test_a_value_that_a_key_does_not_take_is_refused_by_name_and_value(tmp_path, name, key, value):
    config = {**CONFIGS[name], key: value}
    says = refusal(lambda: from_config(written(tmp_path / "model", config)).total_parameters())
    imported = refusal(lambda: find_nemo_class(json.loads(json.dumps(config))))
    if value is not None and not hf_values.KEYS[key].accepts(value):
        for message in (says, imported):
            assert key in message
            assert repr(value)[:40] in message
            assert f"not {hf_values.KEYS[key].words}" in message


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["llama", "gpt_oss", "deepseek_v3"]),
    st.sampled_from(["rope_scaling", "rope_parameters", "rope_parameters.full_attention"]),
    st.sampled_from(["linear", "yarn", "llama3", "dynamic", "longrope", "default", "strange"]),
    st.sampled_from(sorted(hf_values.ROPE)),
    HOSTILE,
)
def test_a_rotary_scaling_is_judged_alike_wherever_it_stands(tmp_path, name, place, kind, key, value):
    base = next(config for model, config in CONFIGS.items() if model.startswith(name))
    outer, _, inner = place.partition(".")
    scaling = {"rope_type": kind, key: value}
    config = {**base, outer: {inner: scaling} if inner else scaling}
    says = refusal(lambda: from_config(written(tmp_path / "model", config)))
    imported = refusal(lambda: find_nemo_class(config))
    if value is not None and not hf_values.ROPE[key].accepts(value):
        for message in (says, imported):
            assert f"{place}.{key} is " in message
            assert f"not {hf_values.ROPE[key].words}" in message
    elif kind == "linear" and key != "factor" and key not in ("rope_type", "type"):
        assert f"{place}.factor is missing" in says
        assert f"{place}.factor is missing" in imported


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({**CONFIGS["deepseek_v3"], "kv_lora_rank": -1}, "kv_lora_rank is -1, not an integer from 1 to 10,000,000"),
        ({**CONFIGS["llama3_8b"], "head_dim": 0}, "head_dim is 0, not an integer from 1"),
        ({**CONFIGS["llama3_8b"], "rope_theta": 10**400}, "rope_theta is 1000.*not a number greater than 0, up to 1e"),
        ({**CONFIGS["llama3_8b"], "layer_types": "full"}, "layer_types is 'full', not a list of strings"),
        ({**CONFIGS["llama3_8b"], "model_type": ["llama"]}, r"model_type is \['llama'\], not a string"),
        ({**CONFIGS["llama3_8b"], "rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({**CONFIGS["llama3_8b"], "text_config": [1]}, r"text_config is \[1\], not an object"),
        ({**CONFIGS["gemma3_27b"], "text_config": {"head_dim": -4}}, "text_config: head_dim is -4"),
    ],
)
def test_what_was_tried_by_hand(tmp_path, config, says):
    with pytest.raises(UserError, match=says) as refused:
        from_config(written(tmp_path / "model", config))
    assert "correct the file" in refused.value.hint


def test_a_null_says_that_there_is_none(tmp_path):
    gemma = {**CONFIGS["gemma2_27b"], "sliding_window": None, "attn_logit_softcapping": None}
    shape = from_config(written(tmp_path / "gemma", gemma))
    assert (shape.window, shape.soft_capped) == (0, False)
    absent = {key: value for key, value in CONFIGS["gemma2_27b"].items() if key != "sliding_window"}
    assert from_config(written(tmp_path / "absent", absent)).window == 4096
    qwen = from_config(written(tmp_path / "qwen", {**CONFIGS["qwen3_8b"], "decoder_sparse_step": None}))
    assert qwen.layers == 36
