"""`violations` against Megatron-Core itself: 300 drawn jobs by default, 2,000 in CI, more by hand (docs/LOG.md)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from superpod.planner.rules import rules
from superpod.planner.rules.job_rules import GENERAL, MEGATRON, PINNED

HERE = Path(__file__).parent
SHARE_LEGAL, HITS = 0.4, 20

NOT_BUILT = {
    "hybrid_stages": "Mamba's layers need the CUDA package mamba_ssm",
    "mamba_heads": "the same",
    "mamba_groups": "the same",
    "mamba_cp": "the same",
    "delta_key_heads": "gated delta net comes with megatron-core 0.16",
    "runs_stages": "layers of different widths are NeMo's own specification",
    "adapters_vp": "adapters are NeMo's, and it is their checkpoint that is empty",
    "recompute_frozen": "adapters are NeMo's; seen in a rehearsal (docs/LOG.md)",
    "recompute_frozen_norm": "the same",
    "recompute_frozen_up": "the same; seen in the proof with Transformer Engine",
}
"""Rules whose models cannot be built here, and why."""


@pytest.mark.nemo
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("jobs", "hits"), [(300, 0), pytest.param(2000, HITS, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_megatron_takes_what_is_legal_here_and_nothing_else(jobs, hits):
    command = [sys.executable, "-W", "ignore", HERE / "compare_megatron.py", "--jobs", jobs]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environ, timeout=850)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.rpartition("RESULT")[2])
    print({name: value for name, value in result.items() if name != "hits"})
    assert result["differ"] == []
    assert result["jobs"] == jobs
    assert result["legal"] >= SHARE_LEGAL * jobs
    known = {rule.name for rule in (*rules.LAYOUT, *rules.MODEL, *GENERAL, *MEGATRON, *PINNED)} - set(NOT_BUILT)
    seldom = {name: result["hits"].get(name, 0) for name in known if result["hits"].get(name, 0) < hits}
    assert seldom == {}
