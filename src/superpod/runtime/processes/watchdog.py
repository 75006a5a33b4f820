"""Run a watchdog process that terminates the descendants of a command if the command itself is killed.

After a SIGKILL, no handler of the command runs, and its descendants (torchrun, ranks, their data workers and checkpoint
writers, a conversion) would keep running for hours. The watchdog runs in a separate session, so that neither Ctrl-C,
nor a closed terminal, nor a signal to the command's process group ends it. Standard library only.

As a process: `python -I watchdog.py PID ATTEMPT` waits until the process PID has exited.
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

if __name__ == "__main__":  # -I excludes the path of the package
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from superpod.runtime.processes.attempt_processes import MARK, find, kill_group, ranks_of, send

POLL_S = 0.5
"""Seconds between checks that the command is still running."""

SAVE_S = 30
"""Seconds that the ranks of a killed launcher may take to save and exit before they are killed."""

pids: set[int] = set()
"""Pids of the watchdogs that this process has started."""


class Watchdog:
    """A child process that terminates process groups and the processes of an attempt when its parent has exited."""

    def __init__(self, attempt: Path | None = None) -> None:
        # -I: do not import from the current folder.
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
        """Also terminate the process group (or session) whose leader has the pid `leader`."""
        pipe = self._process.stdin
        with contextlib.suppress(OSError, ValueError):
            if pipe:
                pipe.write(f"{leader}\n".encode())
                pipe.flush()

    def close(self) -> None:
        """Stop the watchdog. Call it after all processes that it watches have exited."""
        self._process.kill()
        self._process.wait()
        pids.discard(self._process.pid)
        if self._process.stdin:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


@contextlib.contextmanager
def run_watchdog(attempt: Path | None = None) -> Iterator[Watchdog]:
    """Run a watchdog within the block; `attempt` is the folder of the attempt whose processes it terminates."""
    watchdog = Watchdog(attempt)
    try:
        yield watchdog
    finally:
        watchdog.close()


def run_logged(command: list[str], log: Path) -> int:
    """Run a command in a separate session, append its output to `log`, and return its exit code.

    Its descendants are killed when it exits, or when this process exits. Signals from the terminal do not reach it.
    """
    with log.open("ab") as sink, run_watchdog() as watchdog:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True)
        watchdog.add_group(process.pid)
        try:
            return process.wait()
        finally:
            kill_group(process.pid)
            process.wait()


# -- code of the watchdog process --------------------------------------------------------------------------------------


def main(command: int, attempt: Path | None) -> None:
    """Wait until the process with pid `command` has exited, then terminate its descendants."""
    # The watchdog must outlive the command, whatever ends the command's process group.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for leader in _wait_for_exit(command):
        kill_group(leader)
    if attempt and attempt.is_dir():
        killed_at = time.time()
        _terminate_attempt(attempt)
        _record_end(attempt, command, killed_at)


def _wait_for_exit(command: int) -> list[int]:
    """Wait until the parent, with pid `command`, has exited; return the group leaders that it wrote to stdin."""
    leaders: list[int] = []
    pipe, text = sys.stdin.fileno(), b""
    is_open = True
    while True:
        is_gone = os.getppid() != command  # checked before the pipe is read, so that nothing in it is missed
        while is_open and select.select([pipe], [], [], 0 if is_gone else POLL_S)[0]:
            piece = os.read(pipe, 4096)
            is_open, text = bool(piece), text + piece
        *lines, text = text.split(b"\n")
        leaders += [int(line) for line in lines]
        if is_gone:
            return leaders
        if not is_open:
            time.sleep(POLL_S)


def _terminate_attempt(attempt: Path) -> None:
    """Give the ranks SAVE_S seconds to save and exit, as after Ctrl-C; then kill all remaining processes."""
    ranks = ranks_of(find(attempt))
    send(ranks, signal.SIGTERM)
    deadline = time.monotonic() + SAVE_S
    while time.monotonic() < deadline and find(attempt).keys() & {*ranks}:
        time.sleep(POLL_S)
    for _ in range(20):  # a killed process may have started another just before
        processes = find(attempt)
        if not processes:
            return
        send(processes, signal.SIGKILL)
        time.sleep(POLL_S)


def _record_end(attempt: Path, command: int, killed_at: float) -> None:
    """Record in result.json that the launcher, with pid `command`, was killed at the Unix time `killed_at`."""
    # Imported here, since a watchdog needs this only at the end.
    from superpod.common.json_files import write_json
    from superpod.runtime.runs import pending_facts
    from superpod.runtime.runs.run_folder import Attempt, RunFolder, as_user_errors
    from superpod.runtime.runs.run_state import LAUNCHER_KILLED, State

    this, run = Attempt(attempt), RunFolder(attempt.parents[1])
    time_text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(killed_at))
    killed = f"its launcher, pid {command} on host {socket.gethostname()}, was killed at {time_text}"
    if "ended" in this.result:  # killed during the export
        with as_user_errors(attempt):
            write_json(attempt / "result.json", {**this.result, LAUNCHER_KILLED: killed})
        return
    pending_facts.apply(run)
    last = this.heartbeat()
    recorded_facts = {LAUNCHER_KILLED: killed, "last_step": last.get("step")}
    if run.done:
        this.finish(State.DONE, **recorded_facts)
        return
    saved_note = ", but the ranks saved a checkpoint first" if last.get("checkpoint") else ""
    this.finish(State.FAILED, message=f"{killed}{saved_note}; {run.resume_hint}", **recorded_facts)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2] else None)
