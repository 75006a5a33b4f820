import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def described(tmp_path_factory):
    """Output of tests/nemo2/describe.py for the first recipe of every model and task."""
    return _described(tmp_path_factory.mktemp("described") / "answer.json")


@pytest.fixture(scope="session")
def all_described(tmp_path_factory):
    """Output of tests/nemo2/describe.py for every recipe."""
    return _described(tmp_path_factory.mktemp("described") / "answer.json", "--all")


def _described(answer, *arguments):
    """Run describe.py in a separate process, which imports NeMo once."""
    script = Path(__file__).parent / "describe.py"
    command = [sys.executable, "-W", "ignore", script, answer, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(answer.read_text())
