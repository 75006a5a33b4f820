"""Failure drills: a real run of two ranks ends by itself if a rank dies, a rank is stuck, or the loss is NaN."""

import json
import os
import signal
import time

import pytest

from tests.launch.test_local import SMALL, TP1, Running, left_behind, text

pytestmark = [pytest.mark.nemo, pytest.mark.train, pytest.mark.long]

DP2 = (*TP1[1:], "trainer.devices=2")
LIMIT_S = 45
"""Seconds without a step after which a run is ended, in these drills."""

assert text  # a fixture


def running(tmp_path, data, *more, steps=2000):
    words = ("tiny_llama3_fp32", *SMALL, *DP2, f"trainer.max_steps={steps}", *more, "--data", str(data))
    return Running(tmp_path, *words, env={"SUPERPOD_STALLED_S": str(LIMIT_S)})


def ranks(run):
    """Process ids by rank."""
    import psutil

    return {int(psutil.Process(pid).environ()["RANK"]): pid for pid in run.ranks()}


def ended(run, began, within_s):
    code, output = run.end(within_s)
    assert code == 1, output
    assert time.monotonic() - began < within_s
    folder = run.run_dir()
    assert left_behind(folder) == []
    return folder.attempts[-1].result, output


def test_dead_rank_ends_the_run(tmp_path, text):
    run = running(tmp_path, text)
    run.until_step(3, limit_s=420)
    os.kill(ranks(run)[1], signal.SIGKILL)
    result, output = ended(run, time.monotonic(), 120)
    assert result["state"] == "failed"
    assert "rank 1" in result["message"], output
    assert "SIGKILL" in result["message"] or "signal 9" in result["message"]


def test_stuck_rank_ends_the_run(tmp_path, text):
    run = running(tmp_path, text)
    folder = run.until_step(3, limit_s=420)
    os.kill(ranks(run)[1], signal.SIGSTOP)
    result, output = ended(run, time.monotonic(), LIMIT_S + 120)
    assert result["state"] == "stalled"
    assert result["message"].startswith("rank 1 on ")
    assert "no longer answers since step" in result["message"]
    assert result["message"] in " ".join(output.split())
    assert folder.metrics()


def test_hanging_rank_is_ended_by_timeouts(tmp_path, text):
    """nvidia-resiliency-ext learns its timeouts from an attempt that loaded a checkpoint and saved one."""
    run = running(tmp_path, text, "with=fault_tolerance", "log.ckpt.every_n_train_steps=4")
    folder = run.until_step(6, limit_s=420)
    for step in (12, 18):
        os.kill(run.process.pid, signal.SIGINT)
        assert run.end()[0] == 130
        run = Running(tmp_path, "tiny_llama3_fp32", "--resume", str(folder.path))
        run.until_step(step, folder, limit_s=420)
    learned = json.loads((folder.path / "ft_state" / "_ft_state.json").read_text())["current_timeouts"]["heartbeat"]
    os.kill(ranks(run)[1], signal.SIGSTOP)
    began = time.monotonic()
    code, output = run.end(learned["subsequent"] + 120)
    assert code == 1, output
    assert time.monotonic() - began < 600, "ended earlier than our own watchdog would have"
    result = folder.attempts[-1].result
    assert result["state"] == "failed"
    assert "no heartbeat of rank" in result["message"], output
    assert left_behind(folder) == []


def test_nan_loss_ends_the_run(tmp_path, text):
    run = running(tmp_path, text, "model.config.init_method_std=1e30")
    began = time.monotonic()
    result, output = ended(run, began, 420)
    assert result["state"] == "failed"
    assert "nan" in result["message"].lower(), output
    assert "rank" in result["message"].lower()  # Megatron's check, before the gradients are summed over ranks
    assert "failed at step" in output
