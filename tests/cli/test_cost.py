"""`recipes cost`: hours and money of a token budget."""

import json

import pytest

from tests.cli.planning import printed


def test_cost_follows_from_throughput_and_price(recipes_cli):
    words = ("cost", "llama3_70b_pretrain_h100_bf16", "--tokens", "1T", "--price", "2", "--json")
    cost = json.loads(printed(recipes_cli, *words))
    assert cost["gpu_hours"] == pytest.approx(1e12 / cost["tokens_per_s_per_gpu"] / 3600)
    assert cost["money"] == pytest.approx(2 * cost["gpu_hours"])
