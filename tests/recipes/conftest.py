import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def described(tmp_path_factory):
    """What tests/recipes/describe.py says of every recipe; NeMo is imported once, in a process of its own."""
    script = Path(__file__).parent / "describe.py"
    answer = tmp_path_factory.mktemp("described") / "answer.json"
    command = [sys.executable, "-W", "ignore", script, answer]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(answer.read_text())
