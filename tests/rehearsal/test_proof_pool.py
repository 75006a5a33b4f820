"""The processes of a proof, when the proof itself is killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time

PARENT = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from superpod.rehearsal import proof_pool

if __name__ == "__main__":
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), proof_pool.end_with_parent) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        time.sleep(600)
"""


def test_a_killed_proof_leaves_no_processes(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    with contextlib.suppress(ProcessLookupError):
        for _ in range(300):
            os.kill(child, 0)  # raises once it is gone
            time.sleep(0.1)
        os.kill(child, signal.SIGKILL)
        raise AssertionError(f"{child} outlived its proof by 30 s")
