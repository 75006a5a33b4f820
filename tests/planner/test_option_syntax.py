"""The small languages of a command line: what they mean, and that what is printed can be given back."""

import pytest

from superpod.errors import UserError
from superpod.planner import explain, option_syntax
from superpod.planner.layout import Layout
from superpod.planner.planned_job import Options

LAYOUTS = (
    Layout(),
    Layout(tp=4, pp=2, vp=2, sp=True, cp=2, ep=8, etp=1, mbs=2),
    Layout(pp=32, chunks=(1, *[2] * 29, 1, 1)),
    Layout(pp=2, vp=2, chunks=(1, 2, 3, 2), recompute="selective", recompute_modules=("mlp", "layernorm")),
    Layout(recompute="full", recompute_method="block", recompute_layers=3, sharding="zero3", loss_as_layer=True),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=explain.as_option)
def test_the_layout_that_is_printed_can_be_given_back(layout):
    assert option_syntax.layout(Layout(), explain.as_option(layout)) == layout


def test_equal_chunks_are_counted():
    assert explain.as_option(LAYOUTS[2]) == "pp=32,chunks=1+29x2+2x1"
    with pytest.raises(UserError, match="20,000 chunks"):
        option_syntax.layout(Layout(), "chunks=20000x1")


@pytest.mark.parametrize(
    ("words", "targets"),
    [
        (["lora_targets=linear_qkv"], ("linear_qkv",)),
        (["lora_targets=linear_qkv,linear_proj"], ("linear_qkv", "linear_proj")),
        (["lora_targets=linear_qkv+linear_fc2,deterministic"], ("linear_qkv", "linear_fc2")),
        (["offload=1,lora_targets=linear_fc1, linear_fc2,lora_rank=8"], ("linear_fc1", "linear_fc2")),
    ],
)
def test_lora_targets_are_names_with_commas(words, targets):
    options = option_syntax.options(Options(), words)
    assert options.lora_targets == targets
    assert options.deterministic == ("deterministic" in words[0])


@pytest.mark.parametrize(
    ("words", "says", "hint"),
    [
        ("lora_targets=linear_qvk", "cannot name 'linear_qvk'", "linear_qkv"),
        ("lora_targets", "names nothing", "linear_qkv"),
        ("linear_qkv", "no option is called 'linear_qkv'", ""),
        ("moments=bf16,fp32", "no option is called 'fp32'", ""),
    ],
)
def test_other_names_are_refused(words, says, hint):
    with pytest.raises(UserError, match=says) as refused:
        option_syntax.options(Options(), [words])
    assert hint in refused.value.hint


@pytest.mark.parametrize("release", ["MLPerf v4.1", "tag v25.04.02", "era TYPO", "25.09"])
def test_a_release_that_the_planner_does_not_know_is_refused(release):
    with pytest.raises(UserError, match="--option release is"):
        option_syntax.options(Options(), [f"release={release}"])
    assert option_syntax.options(Options(), ["release=NeMo 25.09"]).release == "NeMo 25.09"


@pytest.mark.parametrize(
    ("text", "says"), [("", "says nothing"), ("tp=2,,pp=2", "says nothing"), ("=,=", "without a key")]
)
def test_a_layout_with_nothing_at_a_place_is_refused(text, says):
    with pytest.raises(UserError, match=says):
        option_syntax.layout(Layout(), text)
