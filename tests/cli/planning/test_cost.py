"""`recipes cost`: GPU-hours and money for a token budget."""

import json

import pytest
from typer.testing import CliRunner

from superpod.cli.app import app
from superpod.errors import UserError
from tests.cli.planning.small_plans import printed


def test_cost_follows_from_throughput_and_price(recipes_cli):
    words = ("cost", "llama3_70b_pretrain_h100_bf16", "--tokens", "1T", "--price", "2", "--json")
    cost = json.loads(printed(recipes_cli, *words))
    assert cost["gpu_hours"] == pytest.approx(1e12 / cost["tokens_per_s_per_gpu"] / 3600)
    assert cost["money"] == pytest.approx(2 * cost["gpu_hours"])


COMPARED = ("cost", "llama3_8b", "--gpu", "h100,h200", "--gpus", "64", "--tokens", "1T")


@pytest.mark.slow
def test_several_gpus_are_sorted_by_cost(recipes_cli):
    budgets = json.loads(printed(recipes_cli, *COMPARED, "--price", "h100=2,h200=9", "--json"))
    assert [budget["gpu"] for budget in budgets] == ["h100", "h200"]
    assert budgets[0]["money"] < budgets[1]["money"]
    dear = json.loads(printed(recipes_cli, *COMPARED, "--price", "h100=9,h200=2", "--json"))
    assert [budget["gpu"] for budget in dear] == ["h200", "h100"]
    text = printed(recipes_cli, *COMPARED, "--price", "h100=9,h200=2", "--currency", "EUR")
    assert "cost EUR" in text.splitlines()[0]
    assert "1T tokens at seq 8,192 and gbs 512; 100% of the wall-clock time is productive" in text


@pytest.mark.parametrize(
    ("price", "says"),
    [("much", "not 'much'"), ("b200=3", "--price names 'b200', but --gpu does not"), ("h100=-1", "not -1.0")],
)
def test_an_invalid_price_is_refused(price, says, recipes_cli):
    done = recipes_cli(*COMPARED, "--price", price)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())


RECIPE = ("cost", "llama3_8b_pretrain_h100_bf16", "--tokens", "1T")


def test_a_price_may_name_the_gpu_of_the_recipe_in_any_case(recipes_cli):
    named = json.loads(printed(recipes_cli, *RECIPE, "--price", "H100=2", "--json"))
    assert named["money"] == pytest.approx(2 * named["gpu_hours"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--price", "b200=2"), "--price names 'b200', but the plan uses h100"),
        (("--price", "h100=2,h100=3"), "two prices"),
        (("--price", "2,3"), "two prices"),
        (("--price", "٢"), "not '٢'"),
        (("--price", "1_0"), "not '1_0'"),
        (("--pue", "1e308", "--price", "1e200"), "is not finite"),
        (("--currency", "E\nR"), r"characters: 'E\nR'"),
        (("--currency", "E" * 40), "characters: 'EEE"),
        (("--tokens", "1e15T"), "at most 1e+18"),
    ],
)
def test_invalid_options_are_refused(words, says):
    kept = RECIPE[:2] if words[0] == "--tokens" else RECIPE
    refused = CliRunner().invoke(app, [*kept, *words]).exception
    assert isinstance(refused, UserError)
    assert says in str(refused)
