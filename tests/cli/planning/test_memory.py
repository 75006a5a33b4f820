"""`recipes memory`."""

import json

import pytest

from tests.cli.planning.small_plans import printed


def test_memory_shows_every_stage(recipes_cli):
    words = ("memory", "llama3_70b_pretrain_h100_bf16", "--layout", "tp=4,pp=4,vp=5,cp=2,sp")
    text = printed(recipes_cli, *words)
    assert [line.split()[1] for line in text.splitlines() if line.startswith("rank")] == ["0", "1", "2", "3"]
    stages = json.loads(printed(recipes_cli, *words, "--json"))["stages"]
    assert stages[0]["bytes"]["activations"] > stages[3]["bytes"]["activations"] > 0


def test_the_bars_are_readable_without_color(recipes_cli):
    text = printed(recipes_cli, "memory", "llama3_70b_pretrain_h100_bf16", env={"NO_COLOR": "1"})
    assert text.isascii()
    stages = json.loads(printed(recipes_cli, "memory", "llama3_70b_pretrain_h100_bf16", "--json"))["stages"]
    owners = {key for stage in stages for key, size in stage["bytes"].items() if size}
    letters = {" ".join(line.split()[1:-2]): line.split()[0] for line in text.splitlines() if line.startswith("  ")}
    assert set(letters) == {owner.replace("_", " ") for owner in owners}
    assert len(set(letters.values())) == len(letters)
    bars = [line[9:].split("|")[0] for line in text.splitlines() if line.startswith("rank")]
    assert len(bars) == len(stages) == 4
    for bar, stage in zip(bars, stages, strict=True):
        assert set(bar) <= {*letters.values(), ".", " "}
        drawn = {owner: bar.count(letter) for owner, letter in letters.items() if letter in bar}
        assert len(drawn) >= 2, bar
        total = sum(stage["bytes"].values())
        for owner, size in stage["bytes"].items():
            share = drawn.get(owner.replace("_", " "), 0) / sum(drawn.values())
            assert share == pytest.approx(size / total, abs=0.05), (bar, owner)
