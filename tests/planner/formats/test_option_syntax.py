"""The small languages of a command line: what they mean, and that what is printed can be given back."""

import pytest

from superpod.errors import UserError
from superpod.planner.formats import option_syntax
from superpod.planner.layout import Layout
from superpod.planner.planned_job import Options

LAYOUTS = (
    Layout(),
    Layout(tp=4, pp=2, vp=2, sp=True, cp=2, ep=8, etp=1, mbs=2),
    Layout(pp=32, chunks=(1, *[2] * 29, 1, 1)),
    Layout(pp=2, vp=2, chunks=(1, 2, 3, 2), recompute="selective", recompute_modules=("mlp", "layernorm")),
    Layout(recompute="full", recompute_method="block", recompute_layers=3, sharding="zero3", loss_as_layer=True),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=option_syntax.format_layout)
def test_the_layout_that_is_printed_can_be_given_back(layout):
    assert option_syntax.change_layout(Layout(), option_syntax.format_layout(layout)) == layout


def test_equal_chunks_are_counted():
    assert option_syntax.format_layout(LAYOUTS[2]) == "pp=32,chunks=1+29x2+2x1"
    with pytest.raises(UserError, match="20,000 chunks"):
        option_syntax.change_layout(Layout(), "chunks=20000x1")


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
    options = option_syntax.change_options(Options(), words)
    assert options.lora_targets == targets
    assert options.deterministic == ("deterministic" in words[0])


@pytest.mark.parametrize(
    ("words", "says", "hint"),
    [
        ("lora_targets=linear_qvk", "'linear_qvk'", "linear_qkv"),
        ("lora_targets", "is empty", "linear_qkv"),
        ("linear_qkv", "there is no option 'linear_qkv'", ""),
        ("moments=bf16,fp32", "there is no option 'fp32'", ""),
    ],
)
def test_other_names_are_refused(words, says, hint):
    with pytest.raises(UserError, match=says) as refused:
        option_syntax.change_options(Options(), [words])
    assert hint in refused.value.hint


@pytest.mark.parametrize("release", ["MLPerf v4.1", "tag v25.04.02", "era TYPO", "25.09"])
def test_a_release_that_the_planner_does_not_know_is_refused(release):
    with pytest.raises(UserError, match="--option release="):
        option_syntax.change_options(Options(), [f"release={release}"])
    assert option_syntax.change_options(Options(), ["release=NeMo 25.09"]).release == "NeMo 25.09"


@pytest.mark.parametrize(
    ("text", "says"), [("", "empty entry"), ("tp=2,,pp=2", "empty entry"), ("=,=", "without a key")]
)
def test_a_layout_with_nothing_at_a_place_is_refused(text, says):
    with pytest.raises(UserError, match=says):
        option_syntax.change_layout(Layout(), text)


@pytest.mark.parametrize(
    ("words", "says", "hint"),
    [
        ("deepep=tru", "--option deepep must be true or false, not 'tru'", "did you mean true?"),
        ("deepep=1", "--option deepep must be true or false, not 1", "use --option deepep=true or"),
        ("moments=bf61", "--option moments must be one of fp32, bf16, fp8, not 'bf61'", "did you mean bf16?"),
        ("moments=9", "--option moments must be one of fp32, bf16, fp8, not 9", "use --option moments=fp32"),
        ("lora_rank=1.5", "--option lora_rank must be an integer, not 1.5", "use --option lora_rank=32"),
        ("capacity=x", "--option capacity must be a number, not 'x'", "for example --option capacity=1"),
        ("deterministic,offload=5", "--option offload must be between 0 and 1, not 5.0", "use --option offload=0"),
    ],
)
def test_a_value_that_an_option_cannot_have_is_answered_with_one_that_it_can(words, says, hint):
    with pytest.raises(UserError) as refused:
        option_syntax.change_options(Options(), [words])
    assert says == str(refused.value)
    assert refused.value.hint.startswith(hint)


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("tp=two", "tp must be an integer, not 'two'", "use an integer of at least 1, such as tp=1"),
        ("vp=2.5", "vp must be an integer, not 2.5", "use an integer of at least 1, such as vp=2"),
        ("pp=0", "pp must be at least 1, not 0", "use an integer of at least 1, such as pp=1"),
        ("sp=tru", "sp must be true or false, not 'tru'", "did you mean true?"),
        ("recompute=ful", "recompute must be one of none, selective, full, not 'ful'", "did you mean full?"),
        ("sharding=3", "sharding must be one of none, zero1, zero2, zero3, not 3", "for example sharding=none"),
        ("recompute_modules=mpl", "recompute_modules must be a list of values from core_attn", "did you mean mlp?"),
        ("chunks=a", "chunks must be a list", "specify the layers of each chunk, such as chunks=3+6x4+5"),
    ],
)
def test_a_value_that_a_layout_cannot_have_is_answered_with_one_that_it_can(text, says, hint):
    for read, what in (
        (lambda words: option_syntax.change_layout(Layout(), words), "--layout"),
        (option_syntax.parse_fixed, "--fix"),
    ):
        with pytest.raises(UserError) as refused:
            read(text)
        assert str(refused.value).startswith(f"{what}: {says}")
        assert refused.value.hint.startswith(hint)


def test_what_is_fixed_is_read_as_a_layout_is():
    assert option_syntax.parse_fixed(None) == {}
    assert option_syntax.parse_fixed("tp=4,chunks=1+2x3") == {"tp": 4, "chunks": (1, 3, 3)}


@pytest.mark.parametrize(
    ("text", "hint"),
    [("layout=Et*17|t*15L", "chunks=17+15"), ("Et*17|t*15L", "chunks=17+15"), ("nosuch=1", "keys: tp")],
)
def test_an_unknown_key_of_a_layout_has_a_next_move(text, hint):
    with pytest.raises(UserError, match="there is no layout key") as error:
        option_syntax.change_layout(Layout(), text)
    assert hint in error.value.hint
