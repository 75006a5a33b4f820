"""The processes of a proof, when the proof itself is killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

PARENT = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from superpod.rehearsal.proof import proof_pool

if __name__ == "__main__":
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), proof_pool.end_with_parent) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        time.sleep(600)
"""


INTERRUPTED = """
import json, os, time
from superpod.collection.registry import find
from superpod.rehearsal.proof import proof_pool
from superpod.rehearsal.proof.rank_models import SizeKey

def work(sizes):
    if sizes[0].nodes == 1:  # the first batch is the slow one
        time.sleep(30)
    return [os.getpid() for _ in sizes]

if __name__ == "__main__":
    proof_pool._start = proof_pool.end_with_parent  # without NeMo
    recipe = find("llama32_1b_sft_h100_bf16")
    wanted = {str(nodes): SizeKey.from_recipe(recipe, nodes) for nodes in recipe.nodes}
    done = {}
    try:
        with proof_pool.Workers(2) as pool:
            for results in pool.run(work, wanted, 1):
                done.update(results)
                if len(done) == len(wanted) - 1:
                    print(json.dumps(done), flush=True)
    except KeyboardInterrupt:
        import multiprocessing
        print(len(multiprocessing.active_children()), flush=True)
"""


def test_ctrl_c_ends_a_proof_at_once_and_keeps_the_batches_that_are_done(tmp_path):
    """Batches that were done behind a slow one were kept back, and Ctrl-C waited for the slow one."""
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert parent.stdout is not None
    sent = time.monotonic()
    done = json.loads(parent.stdout.readline())
    assert time.monotonic() - sent < 25, "results of other batches waited for the slow one"
    assert "1" not in done
    sent = time.monotonic()
    os.killpg(parent.pid, signal.SIGINT)  # as a terminal does
    left = parent.stdout.read()
    parent.wait()
    parent.stdout.close()
    assert time.monotonic() - sent < 5
    assert left.strip() == "0"
    for worker in {*done.values()}:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)


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
