"""`recipes fit`."""

import json

import pytest

from tests.cli.planning.small_plans import printed


@pytest.mark.parametrize(("model", "fits"), [("llama3_8b", ["pretrain", "sft", "lora"]), ("llama3_70b", ["lora"])])
@pytest.mark.slow
def test_what_fits_agrees_with_the_plan(model, fits, recipes_cli):
    words = (model, "--gpu", "a100_40gb", "--gpus", "8")
    (row,) = json.loads(printed(recipes_cli, "fit", *words, "--json"))
    assert row["model"] == model
    tasks = ("pretrain", "sft", "lora")
    assert [task for task in tasks if row[task]["layout"]] == fits
    for task in tasks:
        run = ("--gpu", "a100_40gb", "--gpus", "8", "--seq", "4096", "--gbs", "128", "--task", task, "--json")
        plan = json.loads(printed(recipes_cli, "plan", model, *run, code=0 if task in fits else 2))
        if task in fits:
            assert row[task]["tokens_per_s_per_gpu"] <= plan["layouts"][0]["tokens_per_s_per_gpu"] * 1.001
        else:
            assert plan["layouts"] == []
            assert row[task]["short_gib"] > 0


def test_a_model_is_found_by_its_alias(recipes_cli):
    words = ("--gpu", "h100", "--gpus", "1", "--task", "lora", "--json")
    (row,) = json.loads(printed(recipes_cli, "fit", "llama31_8b", *words))
    assert row["model"] == "llama3_8b"


def test_the_table_is_sorted_by_size(recipes_cli):
    text = printed(recipes_cli, "fit", "llama3", "--gpu", "h100", "--gpus", "8")
    assert "GiB short" in next(line for line in text.splitlines() if line.startswith("llama31_405b"))
    assert text.index("llama31_405b") < text.index("llama3_8b")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "this machine has no NVIDIA GPU"),
        (["zzz", "--gpu", "h100"], "no model name contains zzz"),
        (["--gpu", "h1000"], "there is no node 'h1000'"),
        (["llama3_8b", "--gpu", "h100", "--gpus", "0"], "--gpus must be between"),
    ],
)
def test_invalid_options_are_refused(words, says, recipes_cli, tmp_path):
    done = recipes_cli("fit", *words, env={"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())
