"""What killed ranks leave on the nodes of a job is ended: by the real attempt.py as a process, with real processes.

Stand-ins for scontrol and srun; the ranks are a program that leaves a child, as NeMo's checkpoint writers do.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from superpod.common import locks
from superpod.runtime.attempts import attempt
from superpod.runtime.processes import attempt_processes, stray_processes
from tests.runtime import fake_scontrol
from tests.runtime.checkpoints.test_shared_reading import FAKE_SRUN
from tests.runtime.processes.test_watchdog import alive, gone_within

RANKS = """
import os, signal, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from superpod.common import locks
run = os.environ["SUPERPOD_RUN_DIR"]
held = locks.acquire_shared(run + "/" + locks.RANKS)
child = os.fork()  # it inherits the lock
if not child:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    time.sleep(600)
with open(run + "/left", "a") as file:
    file.write(f"{child}\\n")
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "ends":
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
time.sleep(600 if sys.argv[2] == "trains" else 0)
"""


@pytest.fixture
def job(run, tmp_path):
    """Starts a job of the run, on the nodes that are named; its process."""
    fake = fake_scontrol.installed(tmp_path / "fake")
    (fake / "srun").write_text(FAKE_SRUN)
    (fake / "srun").chmod(0o755)
    file = tmp_path / "ranks.py"
    file.write_text(RANKS)
    begun = []

    def start(number, how, nodes="node1", state="FAILED"):
        (fake / "scontrol").write_text(
            f"#!/bin/sh\n[ $2 = hostnames ] && printf '{nodes}' | tr , '\\n'\n"
            f"[ $2 = job ] && [ $4 != {number} ] && echo JobState={state}\nexit 0\n"
        )
        words = ["--recipe", run.recipe, "--runs", str(run.path.parents[1]), "--second-look-s", "0", "--"]
        home = str(Path(attempt.__file__).parents[3])
        command = [sys.executable, attempt.__file__, *words, sys.executable, str(file), home, how]
        environment = fake_scontrol.environment(fake, run, number)
        begun.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.communicate()
    stray_processes.kill_here(run.path)


def left(run):
    """The ids of the children that ranks have left so far."""
    file = run.path / "left"
    deadline = time.monotonic() + 20
    while not (file.exists() and file.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [int(pid) for pid in file.read_text().split()]


@pytest.mark.parametrize("nodes", ["node1", "node1,node2,node3"])
def test_the_end_of_an_attempt_ends_what_killed_ranks_have_left(nodes, run, job, tmp_path):
    """They outlived the job, and the next one waited a minute for the lock that they had inherited."""
    text = job(7, "killed", nodes).communicate(timeout=60)[0]
    assert gone_within(left(run), 1) == []
    assert "node1: killed 1 stray process of killed ranks" in text
    assert run.attempts[0].result["state"] == "failed"
    assert run.attempts[0].result[stray_processes.ENDED] is True
    called = tmp_path / "fake" / "srun.called"
    assert called.exists() == ("," in nodes)
    if "," in nodes:
        assert "--ntasks=3 --ntasks-per-node=1" in called.read_text()


@pytest.mark.parametrize(("state", "of"), [("FAILED", 6), ("RUNNING", 7)])
def test_the_next_job_ends_what_an_attempt_could_not(state, of, run, job):
    """attempt.py was ended with its job, or with its node; a job that was requeued has its old number."""
    first = job(of, "trains")
    (child,) = left(run)
    (rank,) = [pid for pid in attempt_processes.find(run.path) if pid != child]
    for pid in (first.pid, rank):
        os.kill(pid, signal.SIGKILL)
    first.wait()
    assert alive(child)
    assert locks.is_held(run.path / locks.RANKS)
    began = time.monotonic()
    text = job(7, "ends", state=state).communicate(timeout=100)[0]
    assert time.monotonic() - began < 20, "it waits a minute for ranks that nobody ends"
    assert gone_within([child], 0) == []
    assert "node1: killed 1 stray process of killed ranks" in text
    assert stray_processes.ENDED not in run.attempts[0].result
    assert run.attempts[1].result[stray_processes.ENDED] is True


@pytest.mark.slow
def test_ranks_of_a_job_that_has_not_ended_may_save_first(run, job):
    """Slurm may have killed its script alone so far; and who asks gets no answer, or an old one."""
    first = job(6, "trains")
    (child,) = left(run)
    first.kill()
    first.wait()
    second = job(7, "ends", state="RUNNING")
    assert gone_within([child], 3) == [child]
    assert len(run.attempts) == 1, "with a second attempt, the ranks of the first one would not save"
    stray_processes.kill_here(run.path)
    assert second.wait(30) == 1
    assert len(run.attempts) == 2


def test_processes_of_other_runs_and_of_nobody_live(run):
    marks = {"mine": run.path / "attempts" / "001", "others": run.path.with_name("other") / "attempts" / "001"}
    words = [sys.executable, "-c", "import time; time.sleep(600)"]
    started = {
        name: subprocess.Popen(words, env={**os.environ, attempt_processes.MARK: str(m)}) for name, m in marks.items()
    }
    started["nobody's"] = subprocess.Popen(words)
    try:
        deadline = time.monotonic() + 10  # until it is another program than this one
        while started["mine"].pid not in attempt_processes.find(run.path) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert stray_processes.kill_here(run.path) == [1]
        assert started["mine"].wait() == -signal.SIGKILL
        assert all(started[name].poll() is None for name in ("others", "nobody's"))
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def test_a_node_that_does_not_answer_is_looked_at_by_the_next_attempt(run, tmp_path, monkeypatch):
    printed: list[str] = []
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(FAKE_SRUN)
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(srun.parent), prepend=":")
    these = stray_processes.StrayProcesses(run, ["node1", "node2"], "7", printed.append)
    assert these.kill(run.path)
    monkeypatch.setenv("SILENT", "1")
    assert not these.kill(run.path)
    monkeypatch.setenv("STUCK", "0")
    monkeypatch.setattr(stray_processes, "STEP_S", 0.5)
    assert not these.kill(run.path)
    assert these.steps == 3
    assert printed == []
    srun.unlink()
    monkeypatch.setenv("PATH", str(srun.parent))
    assert not these.kill(run.path)


def test_a_process_that_does_not_go_is_named(run, monkeypatch):
    printed: list[str] = []
    monkeypatch.setattr(stray_processes, "kill_here", lambda path: [2, 4711])
    assert not stray_processes.StrayProcesses(run, ["node1"], "7", printed.append).kill(run.path)
    assert printed == [
        "node1: killed 2 stray processes of killed ranks",
        "node1: stray processes of killed ranks could not be killed and may still write checkpoints: pid 4711",
    ]


def test_a_child_of_a_rank_holds_the_ranks_lock(run):
    """The lock is inherited on purpose: whoever still may write into the run's checkpoints holds it."""
    handle = locks.acquire_shared(run.path / locks.RANKS)
    assert handle is not None
    child = os.fork()
    if not child:
        time.sleep(600)
    os.close(handle)
    try:
        assert locks.is_held(run.path / locks.RANKS)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert not locks.is_held(run.path / locks.RANKS)
