"""Weights go to NeMo and back the same and compute what transformers does, or are refused with nothing written.

One process converts all cases: `slow` a cross-section, `long` the whole, which also writes the table of
docs/checkpoints.md under --update-goldens.
"""

import json
import re
import textwrap

import pytest

from superpod.errors import UserError
from superpod.weights.families import families, nemo_class
from tests.conftest import ROOT
from tests.run_module import run_module
from tests.weights import matrix_cases

TOLERANCE = 1e-4
BEGIN, END = "<!-- generated: tests/weights/test_matrix.py -->", "<!-- end generated -->"


def converted(root, names):
    run_module("tests.weights.run_matrix", root, *names, timeout=3000)
    return json.loads((root / "answer.json").read_text())


@pytest.fixture(scope="module")
def cross_section(tmp_path_factory):
    return converted(tmp_path_factory.mktemp("some"), matrix_cases.SLOW)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    return converted(tmp_path_factory.mktemp("all"), ())


def must_be_right(name, answer):
    case = matrix_cases.CASES[name]
    if case.refused:
        assert case.refused in answer["refused"], answer
        assert answer["left"] == []
        return
    assert answer.get("keys") == [], answer
    assert answer.get("own", []) == [], answer  # without what the import kept of the folder
    assert answer["nemo"] < TOLERANCE
    if not case.checked:
        assert answer["record"]["forward_check"] is None
        assert answer["record"]["notes"][0].startswith("no forward check")
        return
    assert answer["record"]["forward_check"]["difference"] < TOLERANCE


@pytest.mark.nemo
@pytest.mark.slow
@pytest.mark.parametrize("name", matrix_cases.SLOW)
def test_a_folder_comes_back_the_same_or_is_refused(cross_section, name):
    must_be_right(name, cross_section[name])


@pytest.mark.nemo
@pytest.mark.long
@pytest.mark.parametrize("name", matrix_cases.CASES)
def test_every_folder_comes_back_the_same_or_is_refused(matrix, name):
    must_be_right(name, matrix[name])


@pytest.mark.nemo
@pytest.mark.long
def test_the_table_of_the_page_is_what_came_out(matrix, request):
    page = ROOT / "docs" / "checkpoints.md"
    before, _, rest = page.read_text().partition(BEGIN)
    shown, _, after = rest.partition(END)
    table = "\n".join(["", "| folder | result |", "|---|---|", *(row(name, matrix[name]) for name in matrix), ""])
    if request.config.getoption("--update-goldens"):
        page.write_text(f"{before}{BEGIN}{table}{END}{after}")
    assert shown == table or request.config.getoption("--update-goldens")


def row(name, answer):
    """Differences change from machine to machine in their last digits: the table says the power of ten."""
    if "refused" in answer:
        words = re.sub(r"/\S*/(\d+)(\S*)", r"FOLDER\2", answer["refused"]).split("; nothing was written")[0]
        words = re.sub(r"by \S+ times the largest, but.*|by \d\.\S+$", "", words).strip(" :")
        return f"| {name} | refused: {textwrap.shorten(words, 150, placeholder=' ...')} |"
    return (
        f"| {name} | the same, logits within 1e-5 |" if answer["nemo"] < 1e-5 else f"| {name} | {answer['nemo']:.0e} |"
    )


def test_the_matrix_is_wide():
    kinds = {case.kind for case in matrix_cases.CASES.values()}
    assert kinds >= set(families.FAMILIES)
    assert len([case for case in matrix_cases.CASES.values() if not case.refused]) >= 30


def config(kind, **keys):
    return {**matrix_cases.BASE, "model_type": kind, **keys}


@pytest.mark.parametrize("kind", [kind for kind in families.FAMILIES if kind not in ("deepseek_v2", "deepseek_v3")])
def test_a_plain_configuration_of_every_family_has_a_class(kind):
    class_ = nemo_class.find_nemo_class(config(kind))
    assert (class_.unknown, class_.doubts) == ((), ())
    assert class_.model == families.FAMILIES[kind].model


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "attention_bias": True}, "attention_bias is True"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling has type 'dynamic'"),
        ({"rope_scaling": "x"}, "rope_scaling is 'x', not an object"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "not a multiple of num_attention_heads"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "has type 'yarn'"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "weights are in bitsandbytes"),
        ({"architectures": ["LlamaModel"]}, "architectures is LlamaModel"),
        ({"vision_config": {}}, "vision_config"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"num_hidden_layers": 10**30}, "not an integer from 1 to 10,000"),
        ({"model_type": "smollm3", "architectures": None, "num_hidden_layers": 10**30}, "not an integer from"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', not true or false"),
        ({"rope_theta": float("inf")}, "rope_theta is inf, not a number greater than 0"),
        ({"max_position_embeddings": "256"}, "max_position_embeddings is '256', not an integer"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_key_value_heads": -2}, "num_key_value_heads is -2"),
        ({"head_dim": 16.0}, "head_dim is 16.0"),
        (
            {"rope_parameters": {"rope_theta": 500.0}, "rope_theta": 1e4},
            "rope_theta is 10000.0, but 500.0 in rope_parameters",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling is {'type': 'linear', 'factor': 2.0}, but None in rope_parameters",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}, "full_attention": {}}},
            "type 'linear' for layers with a sliding window",
        ),
    ],
)
def test_what_the_class_does_not_compute_is_refused_by_key(keys, says):
    with pytest.raises(UserError, match=re.escape(says)):
        nemo_class.find_nemo_class(config("llama", **keys))


def test_old_and_new_keys_of_rotary_embeddings_may_say_the_same():
    new = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    both = config("llama", rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters=new)
    fields = nemo_class.find_nemo_class(both).fields
    assert (fields["rotary_base"], fields["seq_len_interpolation_factor"]) == (500.0, 2.0)


def test_a_window_of_transformers_counts_the_key_itself():
    fields = nemo_class.find_nemo_class(config("mistral", sliding_window=8)).fields
    assert fields["window_size"] == [7, 0]
    assert nemo_class.find_nemo_class(config("mistral", sliding_window=None)).fields["window_size"] is None
    some = nemo_class.find_nemo_class(
        config("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    ).fields
    assert some["window_attn_skip_freq"] == [0, 1]


def test_a_null_is_not_a_default():
    assert nemo_class.find_nemo_class(config("mistral", num_key_value_heads=None)).fields["num_query_groups"] == 4
    assert (
        nemo_class.find_nemo_class(config("gemma2", final_logit_softcapping=None)).fields["final_logit_softcapping"]
        is None
    )


def test_keys_that_nobody_knows_are_named():
    assert nemo_class.find_nemo_class(config("llama", clip_qkv=8.0, logit_scale=2)).unknown == (
        "clip_qkv",
        "logit_scale",
    )
