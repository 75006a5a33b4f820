import json
import subprocess
import sys
from typing import IO, cast

import pytest


@pytest.fixture(scope="session")
def with_te():
    """Ask the process that builds with Transformer Engine's layers: `with_te(recipe=..., set={...})`."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.rehearsal.te.builds"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    questions, answers = cast(IO[str], process.stdin), cast(IO[str], process.stdout)

    def ask(**question):
        print(json.dumps(question), file=questions, flush=True)
        for line in answers:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise AssertionError(f"the process ended with {process.wait()}")

    yield ask
    questions.close()
    answers.close()
    process.wait(timeout=60)
