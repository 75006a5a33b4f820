"""A watchdog process that ends what a command has started when the command itself is killed.

SIGKILL lets no handler of the command run, and what it started would run on for hours: torchrun, ranks, their data
workers and checkpoint writers, a conversion. The watchdog is in a session of its own, so that neither Ctrl-C, nor a
closed terminal, nor a signal to the command's group ends it. Standard library only.

As a process: `python -I watchdog.py PID ATTEMPT` waits until the process PID is gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":  # -I leaves the path of the package out
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from superpod.runtime.processes.attempt_processes import MARK, find, kill_group, ranks_of, send

POLL_S = 0.5
"""Seconds between two looks at the command."""

SAVE_S = 30
"""How long the ranks of a killed launcher may take to save and end, seconds; then they are killed."""

pids: set[int] = set()
"""Of the watchdogs that this process has started, which outlive what it waits for."""


class Watchdog:
    """Ends process groups, and the processes of an attempt, once this process is gone."""

    def __init__(self, attempt: Path | None = None) -> None:
        # -I: nothing is imported from where the command was typed.
        command = [sys.executable, "-I", str(Path(__file__).absolute()), str(os.getpid()), str(attempt or "")]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if name != MARK},
            cwd="/",
            start_new_session=True,
        )
        pids.add(self._process.pid)

    def add_group(self, leader: int) -> None:
        """Also end the process group (or session) that this process leads."""
        pipe = self._process.stdin
        with contextlib.suppress(OSError, ValueError):
            if pipe:
                pipe.write(f"{leader}\n".encode())
                pipe.flush()

    def close(self) -> None:
        """End the watchdog: everything that it watches has ended."""
        self._process.kill()
        self._process.wait()
        pids.discard(self._process.pid)
        if self._process.stdin:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


@contextlib.contextmanager
def watching(attempt: Path | None = None) -> Iterator[Watchdog]:
    """A `Watchdog` while the block runs."""
    watchdog = Watchdog(attempt)
    try:
        yield watchdog
    finally:
        watchdog.close()


def run_logged(command: list[str], log: Path) -> int:
    """The exit code of a command whose output is appended to `log`; what it started ends with it, or with this process.

    It runs in a session of its own, which no signal of the terminal reaches.
    """
    with log.open("ab") as sink, watching() as watchdog:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True)
        watchdog.add_group(process.pid)
        try:
            return process.wait()
        finally:
            kill_group(process.pid)
            process.wait()


# -- in the watchdog process -------------------------------------------------------------------------------------------


def main(command: int, attempt: Path | None) -> None:
    """Wait until the process `command` is gone, then end what it has started."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for leader in _leaders_until_gone(command):
        kill_group(leader)
    if attempt and attempt.is_dir():
        when = time.time()
        _end_attempt(attempt)
        _record(attempt, command, when)


def _leaders_until_gone(command: int) -> list[int]:
    """The group leaders that stdin names until this process has another parent."""
    leaders: list[int] = []
    pipe, text = sys.stdin.fileno(), b""
    is_open = True
    while True:
        is_gone = os.getppid() != command  # before the pipe is read, so that nothing in it is missed
        while is_open and select.select([pipe], [], [], 0 if is_gone else POLL_S)[0]:
            piece = os.read(pipe, 4096)
            is_open, text = bool(piece), text + piece
        *lines, text = text.split(b"\n")
        leaders += [int(line) for line in lines]
        if is_gone:
            return leaders
        if not is_open:
            time.sleep(POLL_S)


def _end_attempt(attempt: Path) -> None:
    """Let the ranks save and end, as after a first Ctrl-C, for SAVE_S; then kill all that is left."""
    ranks = ranks_of(find(attempt))
    send(ranks, signal.SIGTERM)
    deadline = time.monotonic() + SAVE_S
    while time.monotonic() < deadline and find(attempt).keys() & {*ranks}:
        time.sleep(POLL_S)
    for _ in range(20):  # a process that is killed may have started another just before
        processes = find(attempt)
        if not processes:
            return
        send(processes, signal.SIGKILL)
        time.sleep(POLL_S)


def _record(attempt: Path, command: int, when: float) -> None:
    """Record how the attempt ended, unless it has done so itself."""
    # Only here: a watchdog lives as long as its command, and needs none of this until then.
    from superpod.common.files import write_json
    from superpod.runtime.runs import pending_facts
    from superpod.runtime.runs.run_folder import Attempt, RunFolder, as_user_errors
    from superpod.runtime.runs.run_state import LAUNCHER_KILLED, State

    this, run = Attempt(attempt), RunFolder(attempt.parents[1])
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(when))
    killed = f"its launcher, pid {command} on host {socket.gethostname()}, was killed at {at}"
    if "ended" in this.result:  # while it exported
        with as_user_errors(attempt):
            write_json(attempt / "result.json", {**this.result, LAUNCHER_KILLED: killed})
        return
    pending_facts.apply(run)
    beats = this.heartbeat()
    recorded = {LAUNCHER_KILLED: killed, "last_step": beats.get("step")}
    if run.done:
        this.finish(State.DONE, **recorded)
        return
    saved = ", and its ranks saved a checkpoint first" if beats.get("checkpoint") else ""
    this.finish(State.FAILED, message=f"{killed}{saved}; {run.resume_hint}", **recorded)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2] else None)
