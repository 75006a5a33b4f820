"""Finds the processes of an attempt on this machine, and sends signals to them. Linux; standard library only."""

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
"""Environment variable of every process of an attempt: the attempt's folder."""


@dataclass(frozen=True)
class Process:
    """A process as /proc shows it."""

    pid: int
    parent: int

    @functools.cached_property
    def environ(self) -> Mapping[str, str]:
        """The environment that it was started with; {} for a process of another user, or one that has ended since."""
        try:
            text = Path(f"/proc/{self.pid}/environ").read_bytes().decode(errors="surrogateescape")
        except OSError:
            return {}
        return {name: value for name, _, value in (item.partition("=") for item in text.split("\0") if item)}


def find(path: Path) -> dict[int, Process]:
    """Processes that belong to an attempt, or to any attempt of a run, by id; this one is left out.

    These are torchrun, ranks, their data workers and checkpoint writers, which outlive a rank that is killed.
    """
    found = {}
    for process in _living():
        mark = process.environ.get(MARK)
        if mark and process.pid != os.getpid() and (Path(mark) == path or path in Path(mark).parents):
            found[process.pid] = process
    return found


def descendants(ancestor: int) -> dict[int, Process]:
    """The children of a process and theirs, by id."""
    living = {process.pid: process for process in _living()}
    found: dict[int, Process] = {}
    parents = {ancestor}
    while parents:
        parents = {pid for pid, process in living.items() if process.parent in parents and pid not in found}
        found.update({pid: living[pid] for pid in parents})
    return found


def _living() -> list[Process]:
    """All processes of this machine, without those that have ended (zombies)."""
    living = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            if state != "Z":
                living.append(Process(int(folder.name), int(parent)))
    return living


def ranks_of(processes: Mapping[int, Process]) -> list[int]:
    """The ids of those that torchrun started as ranks: a data worker or checkpoint writer is a child of a rank."""
    in_ranks = {pid for pid, process in processes.items() if "RANK" in process.environ}
    return [pid for pid in in_ranks if processes[pid].parent not in in_ranks]


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to the processes that still live."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_group(leader: int) -> None:
    """Kill the process group (or session) that a process leads or has led, with whatever it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def refuse_running(run: Path) -> None:
    """Refuse an attempt while a process of an earlier one lives, torchrun too, which starts before any rank locks.

    Raises:
        UserError: naming the processes, and the command that stops them.
    """
    if pids := sorted(find(run)):
        raise UserError(
            f"processes of {run} still run: {_listed(pids)}",
            f"wait until they end, or stop them: {_kill_command(pids)}",
        )


def ranks_without_launcher(run: Path, attempt: str) -> UserError:
    """The error for ranks of an attempt that hold their run after the process that started them is gone."""
    pids = sorted(find(run))
    where = _listed(pids) if pids else "on another host"
    hint = "wait until they end, or stop them there"
    if pids:
        hint = f"they save and end within a minute; at once, without saving: {_kill_command(pids)}"
    return UserError(
        f"ranks of attempt {attempt} of {run} still run, {where}, but the process that started them is gone", hint
    )


def _listed(pids: list[int]) -> str:
    """'pids 12, 13 and 14 on host a'."""
    *first, last = map(str, pids)
    listed = f"pids {', '.join(first)} and {last}" if first else f"pid {last}"
    return f"{listed} on host {socket.gethostname()}"


def _kill_command(pids: list[int]) -> str:
    return f"kill {' '.join(map(str, pids))}"
