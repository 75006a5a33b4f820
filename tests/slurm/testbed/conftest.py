"""The testbed as a fixture: started once, left as it was."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.testbed.bed import BASE, SCRIPT, Testbed, write_profile
from tests.slurm.testbed.nemo_runs import Nemo
from tests.slurm.testbed.trainings import training

assert training  # a fixture


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slurm)
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(1800))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """The testbed is the machine's Slurm for its own tests only: others in this process must not find it."""
    if Path(__file__).parent not in item.path.parents:
        return (yield)
    os.environ["SLURM_CONF"] = str(BASE / "etc" / "slurm.conf")
    try:
        return (yield)
    finally:
        os.environ.pop("SLURM_CONF", None)


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[Testbed]:
    if os.geteuid():
        pytest.skip("the testbed needs root")
    stood = (BASE / "run" / "slurmctld.pid").exists()
    up = subprocess.run([SCRIPT, "up"], capture_output=True, text=True, timeout=600)
    if "network namespaces" in up.stderr:
        pytest.skip(up.stderr.strip())
    assert up.returncode == 0, up.stderr
    testbed = Testbed()
    yield testbed
    if not stood:
        testbed("down")


@pytest.fixture
def testbed(slurm_cluster) -> Iterator[Testbed]:
    slurm_cluster.reset()
    yield slurm_cluster
    slurm_cluster.reset()


@pytest.fixture
def profile(tmp_path):
    """Write the testbed's profile with folders of this test and text replacements."""

    def make(*changes: tuple[str, str]) -> Path:
        return write_profile(tmp_path / "bed.toml", tmp_path / "runs", *changes)

    return make


@pytest.fixture(scope="session")
def nemo(slurm_cluster, tmp_path_factory, recipes_cli) -> Nemo:
    return Nemo(slurm_cluster, tmp_path_factory.mktemp("nemo"), recipes_cli)
