"""Runs a module of the tests in a process of its own: what imports NeMo leaves nothing behind in pytest's."""

import os
import subprocess
import sys

from tests.conftest import ROOT


def run_module(name, *words, timeout=900):
    """`python -m NAME WORDS`, which must end with 0; its last words are the assertion's."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-W", "ignore", "-m", name, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
