"""Children that multiprocessing starts in a rank end with it."""

import os
import signal
import subprocess
import sys

import pytest

from tests.runtime.processes.test_watchdog import alive, gone_within

RANK = """
import multiprocessing, os, sys, threading, time
from superpod.common import parent_death
fork = multiprocessing.get_context("fork")
def worker(): time.sleep(600)
def writer(pipe):
    own = fork.Process(target=worker)  # a checkpoint writer has writers of its own
    own.start()
    pipe.send(own.pid)
    time.sleep(600)
def start():
    global began
    began = fork.Process(target=worker)
    began.start()
if __name__ == "__main__":
    if sys.argv[1] != "before":
        parent_death.kill_children_with_this_process()
        parent_death.kill_children_with_this_process()
    here, there = fork.Pipe()
    first = fork.Process(target=writer, args=(there,))
    first.start()
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    manager = multiprocessing.get_context("spawn").Manager()
    print(first.pid, here.recv(), manager._process.pid, began.pid, flush=True)
    if sys.argv[1] == "ends":
        first.kill()
        began.kill()
    else:
        time.sleep(600)
"""


@pytest.fixture
def rank(tmp_path):
    """Start a process with a writer, a nested writer, a manager and a child of a thread; returns it and their ids."""
    file = tmp_path / "rank.py"
    file.write_text(RANK)
    begun, left = [], []

    def start(how="tied"):
        process = subprocess.Popen([sys.executable, str(file), how], stdout=subprocess.PIPE, text=True)
        assert process.stdout
        begun.append(process)
        pids = [int(pid) for pid in process.stdout.readline().split()]
        left.extend(pids)
        return process, pids

    yield start
    for process in begun:
        process.kill()
        process.wait()
        process.stdout.close()
    for pid in filter(alive, left):
        os.kill(pid, signal.SIGKILL)


def test_writers_end_with_a_killed_rank(rank):
    """Without the signal, Megatron's manager of the writers outlives ranks that are killed during a save."""
    process, (*theirs, threads) = rank()
    assert all(alive(pid) for pid in (*theirs, threads)), "a thread's child lives though the thread has ended"
    process.kill()
    process.wait()
    assert gone_within(theirs, 5) == []
    assert alive(threads), "nobody ends that one but runtime/processes/stray_processes.py"


def test_writers_survive_without_the_signal(rank):
    process, pids = rank("before")
    process.kill()
    process.wait()
    assert gone_within(pids, 0.5) == pids


def test_nested_writers_end_with_a_killed_writer(rank):
    process, (writer, own, *_) = rank()
    os.kill(writer, signal.SIGKILL)
    assert gone_within([own], 5) == []
    assert alive(process.pid)
    process.kill()
    process.wait()
