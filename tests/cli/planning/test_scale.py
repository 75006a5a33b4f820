"""`recipes scale`."""

import json

import pytest

from tests.cli.planning.small_plans import printed


def test_every_size_has_a_strong_and_a_weak_point(recipes_cli):
    points = json.loads(printed(recipes_cli, "scale", "llama3_8b", "--gpu", "h100", "--gpus", "8,16", "--json"))
    assert [(p["kind"], p["gpus"], p["gbs"]) for p in points] == [
        *(("strong", 8, 512), ("strong", 16, 512), ("weak", 8, 512), ("weak", 16, 1024))
    ]
    assert points[0]["efficiency"] == pytest.approx(1)
