"""Real processes that hang write their stacks, and the odd one is named."""

import subprocess
import sys
import time
from pathlib import Path

from superpod.runtime.attempts import diagnose
from superpod.runtime.rank import stacks
from superpod.runtime.runs.run_folder import RunFolder
from tests.diagnosis.test_why import named, root_of

RANK = """
import sys, threading, time
sys.path.insert(0, {source!r})
from superpod.runtime.rank import capture
capture.register()
def wait(): time.sleep(60)
def forward(): time.sleep(60)
{what}()
"""


def test_ranks_that_hang_write_their_stacks_and_the_odd_one_is_named(tmp_path):
    """Real processes, of which one stands elsewhere and one is stopped."""
    run = RunFolder.create(tmp_path / "a run", "tiny", facts={}, recipe_lines=[])
    attempt = run.new_attempt()
    source, ranks = str(Path(diagnose.__file__).absolute().parents[3]), []
    folder = tmp_path / "torch" / "distributed"
    folder.mkdir(parents=True)
    for rank in range(4):
        place = folder if rank != 2 else tmp_path
        script = place / f"script_{'wait' if rank != 2 else 'forward'}.py"
        script.write_text(RANK.format(source=source, what="wait" if rank != 2 else "forward"))
        with (attempt.path / "logs" / f"0.{rank}.log").open("wb") as log:
            ranks.append(subprocess.Popen([sys.executable, script], stderr=log, stdout=log))
    try:
        _until(lambda: all(stacks._has_handler(rank.pid) for rank in ranks))
        time.sleep(0.5)
        stacks.request_stacks([rank.pid for rank in ranks], attempt)
        words = stacks.describe(attempt.path, 4)
        assert words.startswith("rank 2 was in forward (")
        assert "ranks 0-1, 3 waited in wait (distributed/script_wait.py:" in words
        assert "rank 4 wrote no stack" in stacks.describe(attempt.path, 5)
        attempt.mark("stalled", message="rank 2 on n is stuck in train since step 3, 45 s ago, before the others")
        verdict = diagnose.judge_attempt(run, attempt)
        assert (named(verdict), root_of(verdict).ranks) == ("hang", (2,))
        assert "rank 2 was in forward" in diagnose.summarize(run, attempt).cause
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _until(holds, limit_s=30):
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_process_that_does_not_listen_is_not_signalled(tmp_path):
    run = RunFolder.create(tmp_path, "tiny", facts={}, recipe_lines=[])
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        stacks.request_stacks([sleeper.pid], run.new_attempt())
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()
