"""`recipes cost`: hours and money of a token budget."""

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


def test_several_gpus_are_one_table_the_cheapest_first(recipes_cli):
    budgets = json.loads(printed(recipes_cli, *COMPARED, "--price", "h100=2,h200=9", "--json"))
    assert [budget["gpu"] for budget in budgets] == ["h100", "h200"]
    assert budgets[0]["money"] < budgets[1]["money"]
    dear = json.loads(printed(recipes_cli, *COMPARED, "--price", "h100=9,h200=2", "--json"))
    assert [budget["gpu"] for budget in dear] == ["h200", "h100"]
    text = printed(recipes_cli, *COMPARED, "--price", "h100=9,h200=2", "--currency", "EUR")
    assert "cost EUR" in text.splitlines()[0]
    assert "1T tokens at seq 8,192 and gbs 512; 100% of the time trains" in text


@pytest.mark.parametrize(
    ("price", "says"),
    [("much", "--price is 'much'"), ("b200=3", "--price names 'b200', and --gpu does not"), ("h100=-1", "price is -1")],
)
def test_a_price_that_means_nothing_is_refused(price, says, recipes_cli):
    done = recipes_cli(*COMPARED, "--price", price)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())


RECIPE = ("cost", "llama3_8b_pretrain_h100_bf16", "--tokens", "1T")


def test_a_price_by_name_is_that_of_a_recipes_own_gpu_in_any_case(recipes_cli):
    named = json.loads(printed(recipes_cli, *RECIPE, "--price", "H100=2", "--json"))
    assert named["money"] == pytest.approx(2 * named["gpu_hours"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--price", "b200=2"), "--price names 'b200', and this is planned on h100"),
        (("--price", "h100=2,h100=3"), "twice"),
        (("--price", "2,3"), "twice"),
        (("--price", "٢"), "--price is '٢'"),
        (("--price", "1_0"), "--price is '1_0'"),
        (("--pue", "1e308", "--price", "1e200"), "give no finite cost"),
        (("--currency", "E\nR"), r"--currency is 'E\nR'"),
        (("--currency", "E" * 40), "--currency is 'EEE"),
        (("--tokens", "1e15T"), "at most 1e+18"),
    ],
)
def test_words_of_a_cost_that_mean_nothing_are_refused(words, says):
    kept = RECIPE[:2] if words[0] == "--tokens" else RECIPE
    refused = CliRunner().invoke(app, [*kept, *words]).exception
    assert isinstance(refused, UserError)
    assert says in str(refused)
