"""The processes of an attempt on this machine: waiting for them, stopping them, leaving none behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.errors import UserError
from superpod.runtime.processes import orphans
from superpod.runtime.processes.orphans import MARK
from superpod.runtime.runs.run_folder import RunFolder

if TYPE_CHECKING:
    import psutil

GRACE_S = 120
"""How long the ranks may take to save and end after a stop signal, seconds."""

POLL_S = 0.2

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, kill, and a terminal that is closed."""


def wait_for_all(stop: StopSignal, tick: Callable[..., None]) -> None:
    """Wait until no rank and no torchrun of ours is left; pass a stop signal on to the ranks.

    `tick` is called five times a second, with a message when the ranks are stopped.
    """
    stopping_since = 0.0
    while children := _children():
        tick()
        if stop.received > 1 or (stopping_since and time.monotonic() - stopping_since > GRACE_S):
            send(children, signal.SIGKILL)
        elif stop.received and not stopping_since:
            tick("stopping: the ranks finish their step and save (a second Ctrl-C kills them, and nothing is saved)")
            ranks = [child for child in children if _is_rank(child)]
            send(ranks or children, signal.SIGTERM)
            stopping_since = time.monotonic()
        time.sleep(POLL_S)
    tick()


def _children() -> list[psutil.Process]:
    import psutil

    alive = []
    for child in psutil.Process().children(recursive=True):
        try:
            if child.pid not in orphans.pids and child.status() != psutil.STATUS_ZOMBIE:
                alive.append(child)
        except psutil.NoSuchProcess:
            continue
    return alive


def refuse_beside_others(folder: RunFolder) -> None:
    """Refuse an attempt while a process of an earlier one lives, torchrun too, which starts before any rank locks.

    Raises:
        UserError: naming the processes, and the command that stops them.
    """
    if alive := orphans.words_of(folder.path):
        raise UserError(
            f"processes of {folder.path} still run: {alive}",
            f"wait until they end, or stop them: {orphans.stop_words(folder.path)}",
        )


def processes_of(path: Path) -> list[psutil.Process]:
    """Processes of an attempt, or of any attempt of a run: torchrun, ranks, and what outlives a killed rank.

    Checkpoint writers and data workers do: 0.4 GiB each, and they wait forever.
    """
    import psutil

    processes = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(MARK)
            if process.pid != os.getpid() and mark and Path(mark).is_relative_to(path):
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def _is_rank(process: psutil.Process) -> bool:
    """Whether torchrun started this process as a rank: not torchrun itself, not a data worker of a rank."""
    import psutil

    try:
        return "RANK" in process.environ() and "RANK" not in process.parent().environ()  # pyright: ignore
    except (psutil.Error, AttributeError):
        return False


def send(processes: list[psutil.Process], number: int) -> None:
    """Send signal `number` to those that still live."""
    import psutil

    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


class StopSignal:
    """Counts stop signals while it is installed, in place of NeMo-Run's handlers, which raise.

    A closed terminal (SIGHUP) counts too, unless it is ignored, as under nohup.
    """

    def __init__(self) -> None:
        self.received = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, this process counts stop signals and goes on."""
        numbers = [n for n in STOPS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._count) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _count(self, number: int, frame: object) -> None:
        self.received += 1
