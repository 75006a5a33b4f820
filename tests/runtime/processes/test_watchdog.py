"""What a killed command leaves is ended by the process beside it; real processes, real signals."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from superpod.errors import UserError
from superpod.runtime.processes import attempt_processes, watchdog

COMMAND = """
import os, signal, subprocess, sys, time
from pathlib import Path
from superpod.runtime.processes import attempt_processes, watchdog
from superpod.runtime.runs.run_folder import RunFolder
attempt = Path(sys.argv[1])
marked = {**os.environ, attempt_processes.MARK: str(attempt)}
rank = '''
import os, signal, subprocess, sys, time
saves = sys.argv[1] == "saves"
def stop(*_):
    if saves:
        open(os.environ["SUPERPOD_ATTEMPT_DIR"] + "/saved", "w").close()
        os._exit(0)
signal.signal(signal.SIGTERM, stop)
sleep = "import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, {15}); time.sleep(600)"
worker = subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
print(os.getpid(), worker.pid, flush=True)
time.sleep(600)
'''
with RunFolder(attempt.parents[1]).lock(), watchdog.run_watchdog(attempt) as watching:
    words, marked = [sys.executable, "-c", rank, sys.argv[2]], {**marked, "RANK": "0"}
    child = subprocess.Popen(words, env=marked, start_new_session=True, stdout=subprocess.PIPE, text=True)
    fork = os.fork()
    if not fork:
        os.setsid()
        time.sleep(600)
    watching.add_group(fork)
    print(child.stdout.readline().strip(), fork, flush=True)
    time.sleep(600)
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone_within(pids, seconds):
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@pytest.fixture
def started(run):
    """A command with a rank, its worker and a fork: (the command, their process ids)."""
    begun = []

    def start(kind="saves"):
        attempt = run.new_attempt()
        command = [sys.executable, "-c", COMMAND, str(attempt.path), kind]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        begun.append(process)
        assert process.stdout
        return process, [int(pid) for pid in process.stdout.readline().split()]

    yield start
    for process in begun:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("group", [False, True])
def test_a_killed_command_leaves_no_process_and_its_ranks_save(started, run, group):
    process, pids = started()
    assert all(alive(pid) for pid in pids)
    (os.killpg if group else os.kill)(process.pid, signal.SIGKILL)
    process.wait()
    assert gone_within(pids, 15) == []
    assert (run.attempts[-1].path / "saved").exists(), "the rank was asked to save before anything was killed"
    deadline = time.monotonic() + 10
    while "ended" not in run.attempts[-1].result and time.monotonic() < deadline:
        time.sleep(0.1)
    status = run.status()
    assert status.state == "failed"
    assert f"its launcher, pid {process.pid} on host {socket.gethostname()}, was killed at 20" in status.message
    assert f"`recipes run {run.recipe} --resume {run.path}` resumes it" in status.message


@pytest.mark.slow
def test_a_rank_that_does_not_end_is_killed(started, run, monkeypatch):
    process, pids = started("hangs")
    began = time.monotonic()
    process.kill()
    process.wait()
    first, second = sorted(pids[:2])  # ids start anew at the kernel's largest one
    with pytest.raises(
        UserError, match=rf"processes of .* are still running: pids {first} and {second} on host"
    ) as refused:
        attempt_processes.refuse_running(run.path)
    assert f"kill {first} {second}" in refused.value.hint
    assert gone_within(pids, 50) == []
    assert watchdog.SAVE_S - 5 < time.monotonic() - began < 50
    attempt_processes.refuse_running(run.path)


def test_a_command_that_ends_by_itself_ends_its_watcher():
    script = "from superpod.runtime.processes import watchdog\nwith watchdog.run_watchdog() as w: print(w._process.pid)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not alive(int(done.stdout))
