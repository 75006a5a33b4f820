"""Calls in a separate process: value, refusal, failure and death."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from superpod.common import locks
from superpod.errors import UserError
from superpod.launch import subprocess_call


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
    """The process is forked, like after NeMo's import, and installs no patches."""
    monkeypatch.setattr(subprocess_call, "_can_fork", lambda: True)
    monkeypatch.setattr("superpod.rehearsal.install", lambda: None)


def test_value_is_returned_and_output_is_logged(tmp_path):
    value = subprocess_call.call("json:loads", tmp_path / "log", s="[1, 2]")
    assert value == [1, 2]
    monkey = sys.modules.setdefault("called_here", sys.modules[__name__])
    outcome = subprocess_call.call("called_here:double", tmp_path / "log", number=4)
    assert monkey
    assert (outcome["twice"], outcome["pid"] != os.getpid()) == (8, True)
    assert (tmp_path / "log").read_text() == "working\n"
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_no_process_remains(tmp_path):
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


def open_files():
    return [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()]


def test_a_call_does_not_hold_the_lock_of_the_run(run, tmp_path):
    """A launcher that is killed in its export: the run is free at once, and its state no longer `running`."""
    sys.modules.setdefault("called_here", sys.modules[__name__])
    with run.lock():
        opened = subprocess_call.call("called_here:open_files", tmp_path / "log")
        assert locks.is_held(run.path / locks.LAUNCHER)
    assert opened
    assert not [name for name in opened if name.endswith(locks.LAUNCHER)]


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("refuse", UserError, "^no$"),
        ("fail", subprocess_call.SubprocessFailed, "fail failed: ValueError: broken; see "),
        ("die", subprocess_call.SubprocessFailed, "die failed: exit code 3"),
    ],
)
def test_errors_are_reported(name, kind, says, tmp_path):
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
    assert subprocess_call.call_once("called_here:double", number=1)["twice"] == 2
    with pytest.raises(UserError):
        subprocess_call.call_once("called_here:refuse")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(subprocess_call.SubprocessFailed):
        subprocess_call.call_once("called_here:fail")
    assert len(list(tmp_path.glob("*/log"))) == 1


def test_new_process_returns_the_value(tmp_path):
    request = {"function": "json:loads", "arguments": {"s": "{}"}, "answer": str(tmp_path / "answer.json")}
    script = """
import sys
from superpod import rehearsal
from superpod.launch import subprocess_call
rehearsal.install = lambda: None
subprocess_call._execute(sys.stdin.read())"""
    command = [sys.executable, "-c", script]
    subprocess.run(command, input=json.dumps(request), text=True, check=True, timeout=60)
    assert json.loads((tmp_path / "answer.json").read_text()) == {"value": {}}


CALLER = """
import signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import callee
from superpod import rehearsal
from superpod.cli import _install_stop_handlers
from superpod.launch import subprocess_call
rehearsal.install = lambda: None
subprocess_call._can_fork = lambda: sys.argv[2] == "forked"
_install_stop_handlers()
signal.signal(signal.SIGINT, signal.default_int_handler)
subprocess_call.call("callee:work", Path(sys.argv[1], "log"), folder=sys.argv[1])
"""
CALLEE = """
import multiprocessing, os, tempfile, time
from pathlib import Path
def work(folder):
    with tempfile.TemporaryDirectory(dir=folder, prefix="half-"):
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        worker.start()
        Path(folder, "pids.tmp").write_text(f"{os.getpid()} {worker.pid}")
        Path(folder, "pids.tmp").rename(Path(folder, "pids"))
        time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("way", ["forked", pytest.param("fresh", marks=pytest.mark.slow)])
def test_stopped_caller_leaves_no_process(way, number, tmp_path):
    """The call's process and its children end; its incomplete files are removed unless it was killed."""
    (tmp_path / "callee.py").write_text(CALLEE)
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", CALLER, str(tmp_path), way]
    # A fresh process would import the rehearsal's patches, and torch with them: `light` cannot reach it.
    if way == "fresh":
        (tmp_path / "sitecustomize.py").write_text(
            "import superpod.rehearsal\nsuperpod.rehearsal.install = lambda: 0\n"
        )
    caller = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL, start_new_session=True)
    end = time.monotonic() + 60
    while not (tmp_path / "pids").exists() and time.monotonic() < end:
        time.sleep(0.05)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    caller.send_signal(number)
    assert caller.wait(timeout=20) != 0
    end = time.monotonic() + 20
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in pids)
    if number != signal.SIGKILL:
        assert not list(tmp_path.glob("half-*"))
