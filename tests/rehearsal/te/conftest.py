import json
import subprocess
import sys

import pytest


@pytest.fixture(scope="session")
def with_te():
    """Ask the process that builds with Transformer Engine's layers: `with_te(recipe=..., set={...})`."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.rehearsal.te.builds"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(**question):
        print(json.dumps(question), file=process.stdin, flush=True)
        for line in process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise AssertionError(f"the process ended with {process.wait()}")

    yield ask
    process.stdin.close()
    process.stdout.close()
    process.wait(timeout=60)
