"""One of four ranks of a real run hangs: it is reported with its stack within the stall limit."""

import os
import signal
import time

import pytest

from superpod.runtime.attempts import diagnose
from tests.launch.failures.test_drills import LIMIT_S
from tests.launch.test_local import SMALL, TP1, Running, left_behind, text

pytestmark = [pytest.mark.nemo, pytest.mark.train, pytest.mark.long]

ODD = 2
DP4 = (*TP1[1:], "trainer.devices=4")

HANG = f"""
import os, threading, time
def plant():
    while not os.path.exists(os.environ["HANG_WHEN"]):
        time.sleep(0.1)
    import torch
    from megatron.core.models.gpt.gpt_model import GPTModel
    forward = GPTModel.forward
    def slept_in(self, *words, **named):
        if os.environ["HANG_HOW"] == "sleep":
            time.sleep(3600)
        torch.distributed.all_gather([torch.empty(7) for _ in range(4)], torch.ones(7))
        return forward(self, *words, **named)
    GPTModel.forward = slept_in
if os.environ.get("RANK") == "{ODD}":
    threading.Thread(target=plant, daemon=True).start()
"""
"""Read by every Python that the run starts: rank ODD hangs in its next forward pass once the file HANG_WHEN exists."""

assert text  # a fixture


@pytest.mark.parametrize("how", ["stopped", "sleep", "mismatch"])
def test_hanging_rank_is_reported_with_stack(how, tmp_path, text):
    import psutil

    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "sitecustomize.py").write_text(HANG)
    when = tmp_path / "now"
    path = os.pathsep.join(filter(None, [str(tmp_path / "planted"), os.environ.get("PYTHONPATH", "")]))
    env = {"SUPERPOD_STALLED_S": str(LIMIT_S), "HANG_WHEN": str(when), "HANG_HOW": how, "PYTHONPATH": path}
    words = ("tiny_llama3_fp32", *SMALL, *DP4, "trainer.max_steps=2000", "--data", str(text))
    run = Running(tmp_path, *words, env=env)
    folder = run.until_step(3, limit_s=600)
    began = time.monotonic()
    if how == "stopped":
        ranks = {int(psutil.Process(pid).environ()["RANK"]): pid for pid in run.ranks()}
        os.kill(ranks[ODD], signal.SIGSTOP)
    else:
        when.write_text("")
    code, output = run.end(LIMIT_S + 180)
    assert code == 1, output
    assert time.monotonic() - began < LIMIT_S + 120
    assert left_behind(folder) == []
    attempt = folder.attempts[-1]
    assert attempt.result["state"] == "stalled"
    message = attempt.result["message"]
    root = diagnose.judge_attempt(folder, attempt).root
    assert root
    assert (root.name, root.ranks) == ("hang", (ODD,)), root
    expected = {
        "stopped": f"rank {ODD} wrote no stack (stopped or dead)",
        "sleep": f"rank {ODD} was in slept_in (planted/sitecustomize.py:",
        "mismatch": f"rank {ODD} was in all_gather (",
    }[how]
    assert expected in message, message
    assert "waited in " in message
    assert expected in root.detail
