"""The planner's rules beside Transformer Engine's own Python, 2.9.0, in a process of its own."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT

COMPARE = "tests.planner.kernels.compare_te_python"


@pytest.mark.slow
def test_the_rules_answer_as_get_attention_backend_does():
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-m", COMPARE, "4000"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    if "Python is not installed" in done.stderr:
        pytest.skip("Transformer Engine's Python is not installed")
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["wrong"] == []
    assert min(result["chosen"].values()) > 100
    assert set(result["chosen"]) == {"flash", "fused", "unfused", ""}
