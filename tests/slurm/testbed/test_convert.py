"""A conversion and its inverse as jobs of the testbed."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.nemo]

MAKE = [sys.executable, "-W", "ignore", "-m", "tests.weights.tiny"]


def test_conversion_round_trip_in_jobs(testbed, profile, recipes_cli, tmp_path):
    tensors = pytest.importorskip("safetensors.torch")
    hub, nemo, back = (tmp_path / f"it's $({name}) 100%" for name in ("hub", "nemo", "back"))
    subprocess.run([*MAKE, str(hub), "llama"], cwd=ROOT, check=True, timeout=200)
    for source, out in ((hub, nemo), (nemo, back)):
        submitted = recipes_cli("ckpt", "convert", source, out, "--cluster", profile())
        assert submitted.returncode == 0, submitted.stderr
        job = submitted.stdout.split()[1].rstrip(":")
        assert testbed.until_ended(job) == "COMPLETED", (tmp_path / f"{out.name}.log").read_text()[-3000:]
    before, after = (tensors.load_file(folder / "model.safetensors") for folder in (hub, back))
    assert set(before) == set(after)
    assert all(before[name].equal(after[name]) for name in before)
