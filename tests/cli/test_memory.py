"""`recipes memory` as a user and a program read it."""

import json

from tests.cli.planning import printed


def test_memory_shows_every_stage(recipes_cli):
    words = ("memory", "llama3_70b_pretrain_h100_bf16", "--layout", "tp=4,pp=4,vp=5,cp=2,sp")
    text = printed(recipes_cli, *words)
    assert [line.split()[1] for line in text.splitlines() if line.startswith("rank")] == ["0", "1", "2", "3"]
    stages = json.loads(printed(recipes_cli, *words, "--json"))["stages"]
    assert stages[0]["bytes"]["activations"] > stages[3]["bytes"]["activations"] > 0
