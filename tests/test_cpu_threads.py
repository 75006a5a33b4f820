"""OpenMP threads of ranks on CPUs."""

import os
import subprocess
import sys

import pytest

from superpod.common import cpu_threads
from superpod.launch import local
from superpod.rehearsal.training import forked_run

INSTALL = """
from superpod.rehearsal.patches import registry
registry.install(without=frozenset(patch.name for patch in registry.patches()))
"""
COMMAND = """
import sys
from superpod.cli import main
sys.argv = ["recipes", "--version"]
try:
    main()
finally:
    import torch
"""


@pytest.fixture(autouse=True)
def no_own_setting(monkeypatch):
    monkeypatch.delenv(cpu_threads.THREADS, raising=False)
    monkeypatch.delenv(cpu_threads.POLICY, raising=False)


@pytest.mark.parametrize(
    ("text", "most"), [("max 100000\n", 10**6), ("150000 100000\n", 1), ("50000 100000\n", 1), ("", 10**6)]
)
def test_the_cpu_quota_of_a_container_is_respected(tmp_path, text, most):
    (tmp_path / "cpu.max").write_text(text)
    assert cpu_threads.usable_cores(tmp_path / "cpu.max") == min(len(os.sched_getaffinity(0)), most)


def test_ranks_share_the_cores_and_wait_passively(monkeypatch):
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 8)
    assert cpu_threads.environment(2) == {"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "PASSIVE"}
    assert cpu_threads.threads_per_rank(16) == 1
    assert local.rank_environment(4).items() >= {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}.items()
    assert "OMP_NUM_THREADS" not in local.rank_environment(0)  # ranks on GPUs: torchrun's default
    assert forked_run._torchrun_environment(0, 2)["OMP_NUM_THREADS"] == "1"


def test_settings_of_the_user_take_precedence(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert cpu_threads.environment(2) == {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "ACTIVE"}


@pytest.mark.parametrize("program", [INSTALL, COMMAND])
def test_openmp_uses_the_policy(program):
    """libgomp reads the variables when torch loads it, and prints them with OMP_DISPLAY_ENV."""
    environment = {**os.environ, "OMP_DISPLAY_ENV": "VERBOSE"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert "GOMP_SPINCOUNT = '0'" in done.stderr, done.stderr  # 300,000 by default
