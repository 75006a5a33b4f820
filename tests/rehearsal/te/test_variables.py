"""The variables of whoever starts a build are not the ranks'."""

import json
import os
import subprocess
import sys

import pytest

from superpod.rehearsal.te import variables


def test_what_a_run_reads_is_left_out_and_comes_back(monkeypatch):
    given = {"NVTE_FUSED_ATTN_BACKEND": "x", "UB_SKIPMC": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_ALGO": "Tree"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with variables.unset_run_variables():
        assert not given.keys() & os.environ.keys()
        assert "PATH" in os.environ
        os.environ["NVTE_FLASH_ATTN"] = "0"
    assert dict(os.environ) == before


@pytest.mark.nemo
@pytest.mark.slow
def test_a_build_is_the_same_whatever_the_shell_has():
    """UB_SKIPMC=1 there would hide what Transformer Engine refuses; a backend that is no number would end the build."""
    shell = {"UB_SKIPMC": "1", "NVTE_FUSED_ATTN_BACKEND": "x", "NVTE_DEBUG_LEVEL": "x"}
    questions = [
        {"recipe": "llama3_70b_pretrain_a100_bf16", "without": ["UB_SKIPMC"]},
        {"recipe": "llama3_8b_pretrain_h100_bf16"},
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.rehearsal.te.builds"],
        input="\n".join(map(json.dumps, questions)),
        env={**os.environ, **shell},
        capture_output=True,
        text=True,
        timeout=300,
    )
    refused, built = (json.loads(line[1:]) for line in done.stdout.splitlines() if line.startswith("@"))
    assert "UB_SKIPMC=1" in refused["refused"]
    assert built["parameters"] == built["planned"]
