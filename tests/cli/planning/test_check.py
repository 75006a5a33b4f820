"""`recipes check` of recipes and models: refusals and suggestions."""

import json

import pytest

from tests.cli.planning.small_plans import printed


def test_a_refusal_has_the_rule_the_numbers_and_the_next_step(recipes_cli):
    words = ("check", "llama3_70b", "--gpu", "h100", "--nodes", "6", "--layout", "tp=8,pp=4,cp=2")
    text = printed(recipes_cli, *words, code=2)
    assert "tp 8 x pp 4 x cp 2 = 64 must divide the number of GPUs, which is 48" in text
    assert "next: " in text
    report = json.loads(printed(recipes_cli, *words, "--json", code=2))
    assert report["verdict"] == "illegal"
    assert report["broken"][0]["rule"]


@pytest.mark.parametrize("name", ["llama3_8b_pretrain_h100_bf16", "llama31_405b_pretrain_h100_bf16", "tiny_llama3"])
def test_recipes_of_this_project_pass(recipes_cli, name):
    assert "ok: legal;" in printed(recipes_cli, "check", name)


@pytest.mark.parametrize(
    ("words", "code", "advised"),
    [
        (["llama3_70b", "--gpu", "h100", "--gpus", "16"], 2, True),
        (["llama3_70b", "--gpu", "h100", "--gpus", "16", "--layout", "tp=3"], 2, True),
        (["llama3_8b", "--gpu", "h100", "--gpus", "16", "--layout", "tp=2"], 0, False),
        (["llama31_405b_pretrain_h100_bf16", "--layout", "tp=1"], 2, False),
    ],
)
def test_check_of_a_model_suggests_plan(words, code, advised, recipes_cli):
    text = printed(recipes_cli, "check", *words, code=code)
    assert ("next: `recipes plan llama3_70b --gpu h100 --gpus 16` ranks" in text) == advised
    assert ("only data parallelism was checked" in text) == (advised and "--layout" not in words)


@pytest.mark.parametrize(
    ("words", "last"),
    [
        (
            ["llama3_8b", "--gpu", "a100", "--nodes", "1", "--precision", "fp8ds", "--layout", "tp=2,sp"],
            "next: no layout satisfies this rule; `recipes plan llama3_8b --gpu a100 --nodes 1 --precision auto` plans "
            "other precisions",
        ),
        (["deepseek_v3", "--gpu", "a100", "--gpus", "256", "--task", "sft"], "  next: use a different GPU"),
    ],
)
def test_check_suggests_no_search_if_no_layout_is_legal(words, last, recipes_cli):
    assert printed(recipes_cli, "check", *words, code=2).splitlines()[-1] == last


def test_check_suggests_what_frees_memory(recipes_cli):
    text = printed(recipes_cli, "check", "llama3_70b", "--gpu", "h100", "--nodes", "8", "--layout", "tp=4,pp=2", code=2)
    assert "GiB short" in text
    assert "frees" in text


def test_check_suggests_a_better_layout_with_a_hardware_file_too(recipes_cli, tmp_path):
    (tmp_path / "slower.toml").write_text("[calibration.h100]\ngeneral = 2.0\n")
    words = ("check", "llama3_8b_pretrain_h100_bf16", "--seq", "32768", "--nodes", "2")
    shipped = printed(recipes_cli, *words, code=2, cwd=tmp_path)
    slower = printed(recipes_cli, *words, "--hardware", "slower.toml", code=2, cwd=tmp_path)
    assert "next: a better layout is " in shipped
    seconds = [float(text.partition("mbs 1: ")[2].split()[0]) for text in (shipped, slower)]
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=0.2)
    assert slower.endswith("--hardware slower.toml --layout auto` selects it, also in submit\n")
