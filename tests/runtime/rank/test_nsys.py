"""nsys around the chosen ranks of a Slurm job, where it is installed; a fake nsys starts what it gets."""

import os
import subprocess
import sys

import pytest

from superpod.runtime.rank import nsys

RANK = """
import sys
sys.path.insert(0, {source!r})
from superpod.runtime.rank import nsys
nsys.exec_under_nsys()
import os, signal
print("trains", os.getpid(), signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN, sys.argv[1:], nsys.RANKS in os.environ)
"""
FAKE = """#!/bin/bash
echo "$@" >"$(dirname "$0")/options"
while [[ $1 != *python* ]]; do shift; done
exec "$@"
"""


@pytest.fixture
def rank(tmp_path, request):
    """Start a rank that takes nsys over; returns its output and its process id."""
    script = tmp_path / "rank it's.py"
    script.write_text(RANK.format(source=str(request.config.rootpath / "src")))
    (tmp_path / "bin").mkdir()

    def call(number, ranks, path=None):
        environ = {"PATH": path or f"{tmp_path / 'bin'}:{os.environ['PATH']}", "RANK": str(number)}
        environ |= {nsys.RANKS: ranks, "SUPERPOD_RUN_DIR": str(tmp_path / "run it's")}
        process = subprocess.Popen(
            [sys.executable, str(script), "a b"],
            env=environ,
            stdout=subprocess.PIPE,
            text=True,
            stderr=subprocess.STDOUT,
        )
        return process.communicate(timeout=60)[0], process.pid

    return call


def test_a_chosen_rank_starts_anew_under_nsys_in_the_same_process(rank, tmp_path):
    fake = tmp_path / "bin" / "nsys"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    output, pid = rank(8, "0,8")
    assert output == f"trains {pid} True ['a b'] False\n"
    options = (tmp_path / "bin" / "options").read_text()
    assert f"-o {tmp_path / 'run it'}'s/profile/rank-8 " in options
    assert "--capture-range=cudaProfilerApi" in options
    assert "--export=sqlite" in options


def test_other_ranks_do_not(rank):
    output, pid = rank(1, "0,8")
    assert output == f"trains {pid} False ['a b'] False\n"


def test_a_rank_without_nsys_says_so_and_trains(rank, tmp_path):
    output, pid = rank(8, "0,8", path=str(tmp_path))
    assert output.startswith("rank 8 is not profiled: nsys is not on its PATH")
    assert f"trains {pid} False" in output
