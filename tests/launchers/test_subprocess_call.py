"""A function called in a process of its own: its value, its refusal, its failure, its death."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from superpod.errors import UserError
from superpod.launchers import subprocess_call


def double(number):
    print("working")
    return {"twice": 2 * number, "pid": os.getpid()}


def refuse():
    raise UserError("no", "try yes")


def fail():
    raise ValueError("broken")


def leave_a_process():
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    process.start()
    return process.pid


def die():
    os._exit(3)


@pytest.fixture(autouse=True)
def light(monkeypatch):
    """The process is forked, as where NeMo is imported, and installs no patches."""
    monkeypatch.setattr(subprocess_call, "_can_fork", lambda: True)
    monkeypatch.setattr("superpod.rehearsal.install", lambda: None)


def test_the_value_comes_back_and_the_words_go_to_the_log(tmp_path):
    value = subprocess_call.call("json:loads", tmp_path / "log", s="[1, 2]")
    assert value == [1, 2]
    monkey = sys.modules.setdefault("called_here", sys.modules[__name__])
    outcome = subprocess_call.call("called_here:double", tmp_path / "log", number=4)
    assert monkey
    assert (outcome["twice"], outcome["pid"] != os.getpid()) == (8, True)
    assert (tmp_path / "log").read_text() == "working\n"
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_no_process_is_left(tmp_path):
    sys.modules.setdefault("called_here", sys.modules[__name__])
    pid = subprocess_call.call("called_here:leave_a_process", tmp_path / "log")
    end = time.monotonic() + 20
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert not alive(pid)


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("refuse", UserError, "^no$"),
        ("fail", subprocess_call.SubprocessFailed, "fail failed: ValueError: broken; its log is"),
        ("die", subprocess_call.SubprocessFailed, "die failed: it ended with code 3"),
    ],
)
def test_what_goes_wrong_is_said(name, kind, says, tmp_path):
    sys.modules.setdefault("called_here", sys.modules[__name__])
    with pytest.raises(kind, match=says) as failed:
        subprocess_call.call(f"called_here:{name}", tmp_path / "log")
    if kind is UserError:
        assert failed.value.hint == "try yes"
    if name == "fail":
        assert "Traceback" in (tmp_path / "log").read_text()


def test_a_log_is_kept_only_after_a_failure(tmp_path, monkeypatch):
    sys.modules.setdefault("called_here", sys.modules[__name__])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert subprocess_call.once("called_here:double", number=1)["twice"] == 2
    with pytest.raises(UserError):
        subprocess_call.once("called_here:refuse")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(subprocess_call.SubprocessFailed):
        subprocess_call.once("called_here:fail")
    assert len(list(tmp_path.glob("*/log"))) == 1


def test_a_process_started_afresh_answers_too(tmp_path):
    request = {"function": "json:loads", "arguments": {"s": "{}"}, "answer": str(tmp_path / "answer.json")}
    script = """
import sys
from superpod import rehearsal
from superpod.launchers import subprocess_call
rehearsal.install = lambda: None
subprocess_call._answer(sys.stdin.read())"""
    command = [sys.executable, "-c", script]
    subprocess.run(command, input=json.dumps(request), text=True, check=True, timeout=60)
    assert json.loads((tmp_path / "answer.json").read_text()) == {"value": {}}
