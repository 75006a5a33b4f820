"""Find the processes of an attempt on this machine and send signals to them. Standard library only, Linux only."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from superpod.errors import UserError

MARK = "SUPERPOD_ATTEMPT_DIR"
"""Environment variable with the folder of the attempt, which all processes of the attempt inherit."""


@dataclass(frozen=True)
class Process:
    """A process listed in /proc."""

    pid: int
    parent: int

    @functools.cached_property
    def environ(self) -> Mapping[str, str]:
        """The environment at the start of the process; {} if it belongs to another user or has exited."""
        try:
            text = Path(f"/proc/{self.pid}/environ").read_bytes().decode(errors="surrogateescape")
        except OSError:
            return {}
        items = (item.partition("=") for item in text.split("\0") if item)
        return {name: value for name, _, value in items}


def find(path: Path) -> dict[int, Process]:
    """Return the processes of an attempt, or of all attempts of a run, by pid, excluding this process.

    `path` is the folder of the attempt or run. The processes are torchrun, the ranks, and their data workers and
    checkpoint writers, which survive a killed rank.
    """
    processes = {}
    for process in _list_processes():
        mark = process.environ.get(MARK)
        if mark and process.pid != os.getpid() and (Path(mark) == path or path in Path(mark).parents):
            processes[process.pid] = process
    return processes


def descendants(ancestor: int) -> dict[int, Process]:
    """Return all descendants of the process with pid `ancestor`, by pid."""
    processes = {process.pid: process for process in _list_processes()}
    found: dict[int, Process] = {}
    parents = {ancestor}
    while parents:
        parents = {pid for pid, process in processes.items() if process.parent in parents and pid not in found}
        found.update({pid: processes[pid] for pid in parents})
    return found


def _list_processes() -> list[Process]:
    """Return all processes of this machine except zombies."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            if state != "Z":
                processes.append(Process(int(folder.name), int(parent)))
    return processes


def ranks_of(processes: Mapping[int, Process]) -> list[int]:
    """Return the pids of the ranks among `processes`, excluding their children: data workers and checkpoint writers."""
    in_ranks = {pid for pid, process in processes.items() if "RANK" in process.environ}
    return [pid for pid in in_ranks if processes[pid].parent not in in_ranks]


def send(pids: Iterable[int], number: int) -> None:
    """Send the signal `number` to processes, ignoring those that have exited."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_group(leader: int) -> None:
    """Kill the process group (or session) whose leader has the pid `leader`; the leader may have exited."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def refuse_running(run: Path) -> None:
    """Raise UserError if a process of an earlier attempt of a run is still running, even if no rank holds the lock."""
    pids = sorted(find(run))
    if pids:
        raise UserError(
            f"processes of {run} are still running: {_format_pids(pids)}",
            f"wait until they exit, or terminate them with `{_kill_command(pids)}`",
        )


def ranks_without_launcher(run: Path, attempt: str) -> UserError:
    """Return the error for ranks of an attempt that still hold the lock after their launcher has exited."""
    pids = sorted(find(run))
    location = _format_pids(pids) if pids else "on another host"
    hint = "wait until they exit, or terminate them there"
    if pids:
        hint = f"they save and exit within a minute; terminate them without saving with `{_kill_command(pids)}`"
    return UserError(
        f"ranks of attempt {attempt} of {run} are still running, {location}, but their launcher has exited", hint
    )


def _format_pids(pids: list[int]) -> str:
    """Return, for example, 'pids 12, 13 and 14 on host a'."""
    *first, last = map(str, pids)
    pids_text = f"pids {', '.join(first)} and {last}" if first else f"pid {last}"
    return f"{pids_text} on host {socket.gethostname()}"


def _kill_command(pids: list[int]) -> str:
    return f"kill {' '.join(map(str, pids))}"
