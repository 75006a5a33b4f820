"""Fixtures of the tests of Slurm."""

import pytest

from tests.slurm.fake_slurm import FakeSlurm


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> FakeSlurm:
    """A fake Slurm whose commands come first on the PATH."""
    fake = FakeSlurm(tmp_path / "fake_slurm")
    monkeypatch.setenv("PATH", fake.env["PATH"])
    return fake
