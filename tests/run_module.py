"""Runs a module of the tests in a separate process, because importing NeMo changes the state of a process."""

import os
import subprocess
import sys

from tests.conftest import ROOT


def run_module(name, *words, timeout=900):
    """Run `python -m NAME WORDS`; fail with the end of its stderr if it does not exit with 0."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-W", "ignore", "-m", name, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
