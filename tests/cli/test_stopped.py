"""Verbs that start processes leave none behind when they are stopped by a signal."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.launch.finetuning.test_finetune import run_module

LIMIT_S = 300

VERBS = {
    "data build": ["data", "build", "--text", "text/*.txt", "--vocab-size", "600", "--workers", "2", "--out", "out"],
    "predict": ["predict", "--from", "rows.csv", "--out", "predicted.csv"],
}
"""Verbs that do not need NeMo."""

WITH_NEMO = {
    "prove": ["prove", "tiny_llama3", "--workers", "2", "--cache", "cache.json"],
    "rehearse": ["rehearse", "tiny_llama3", "--ranks", "2", "--steps", "1000"],
    "rehearse a file": ["rehearse", "mine.py", "--ranks", "2"],
    "check a file": ["check", "mine.py"],
    "generate": ["generate", "checkpoint", "a b c", "--tokens", "4000"],
    "perplexity": ["perplexity", "checkpoint", "--data", "data.jsonl"],
    "ckpt convert": ["ckpt", "convert", "model", "nemo"],
}
"""`run` and `finetune` are tested in test_watchdog.py and test_killed_launcher.py."""


def descendants(process):
    """Return all child processes of a command, recursively."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def alive(processes):
    import psutil

    left = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(" ".join(process.cmdline())[:120])
    return left


def kill_at_work(place, words, number, least):
    """Send the signal one second after `least` processes have been started."""
    command = [sys.executable, "-m", "superpod.cli", *words]
    with (place / "log.txt").open("ab") as log:
        process = subprocess.Popen(command, cwd=place, stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + LIMIT_S
    started = descendants(process)
    while len(started) < least and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        started = descendants(process)
    assert len(started) >= least, (place / "log.txt").read_text()[-2000:]
    time.sleep(1.0)
    started += descendants(process)  # some of the first ones may have ended
    process.send_signal(number)
    try:
        code = process.wait(60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while alive(started) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(started) == []
    text = (place / "log.txt").read_text()
    assert "Traceback" not in text, text
    assert code != 0


@pytest.fixture
def place(tmp_path):
    """Create text and rows that take long enough to process for a signal to arrive meanwhile."""
    (tmp_path / "text").mkdir()
    words = " ".join(f"word{i} is number {i * 7919 % 10007}." for i in range(60_000))
    for number in range(12):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number} {words}")
    head = "model,gpus,tp,pp,seq,gbs,mbs,gpu,precision"
    (tmp_path / "rows.csv").write_text(head + "\n" + "llama3_8b,64,2,1,8192,128,1,h100,bf16\n" * 400_000)
    return tmp_path


NUMBERS = [
    pytest.param(signal.SIGKILL, marks=pytest.mark.slow, id="SIGKILL"),
    *(pytest.param(n, marks=pytest.mark.long, id=n.name) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)),
]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("verb", VERBS)
def test_a_stopped_verb_leaves_no_process(verb, number, place):
    kill_at_work(place, VERBS[verb], number, least=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory, recipes_cli):
    """Create a model, its imported checkpoint, a file of samples, and an exported recipe."""
    folder = tmp_path_factory.mktemp("model")
    run_module("tests.weights.tiny", folder / "model")
    done = recipes_cli("ckpt", "convert", folder / "model", folder / "checkpoint", timeout=900)
    assert done.returncode == 0, done.stderr
    rows = (f'{{"prompt": "{at}", "completion": "b"}}\n' for at in range(50_000))
    (folder / "data.jsonl").write_text("".join(rows))
    done = recipes_cli("export", "tiny_llama3", "--to", folder / "mine.py", timeout=900)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.nemo
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda n: n.name)
@pytest.mark.parametrize("verb", WITH_NEMO)
def test_a_stopped_verb_that_needs_nemo_leaves_no_process(verb, number, model, tmp_path):
    for part in model.iterdir():
        (tmp_path / part.name).symlink_to(part)
    kill_at_work(tmp_path, WITH_NEMO[verb], number, least=2)
    assert not list(tmp_path.glob("*nemo*/**")), "no incomplete output"
