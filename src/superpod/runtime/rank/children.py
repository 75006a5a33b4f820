"""What a rank starts by multiprocessing ends with it, however it ends: data workers, checkpoint writers, its monitor.

A rank that is killed cannot end them. A writer goes on writing into a checkpoint that the next attempt will save under
the same name, and Megatron's manager of its writers (multiprocessing.Manager) waits for requests for ever. So each of
them asks the kernel to be killed with its parent (prctl(2), PR_SET_PDEATHSIG). What is started in another way, as by a
thread or as a program, is left to runtime/processes/leftovers.py. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from multiprocessing import spawn, util

_PR_SET_PDEATHSIG = 1

_SPAWNED = """\
import ctypes, os; ctypes.CDLL(None).prctl({option}, {number}, 0, 0, 0); os.getppid() == {parent} or os._exit(1); """
"""Before what a spawned child begins with."""


class _Ties:
    """Of this process's children to it."""

    def __init__(self) -> None:
        self._prctl = ctypes.CDLL(None).prctl
        self._parent, self._is_tied = 0, False

    def note(self) -> None:
        """Before a child is started, in the parent."""
        self._parent = os.getpid()
        # The kernel's parent is a thread: a child that another one starts would be killed when that thread ends.
        self._is_tied = threading.get_native_id() == self._parent

    def forked(self) -> None:
        """In a child that multiprocessing has forked."""
        if self._is_tied:
            self._prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != self._parent:  # it died in between
                os._exit(1)

    def spawned(self, command: list[str]) -> list[str]:
        """The command of a child that multiprocessing spawns, as its parent starts it."""
        self.note()
        if not self._is_tied or "-c" not in command:
            return command
        at = command.index("-c") + 1
        begin = _SPAWNED.format(option=_PR_SET_PDEATHSIG, number=int(signal.SIGKILL), parent=self._parent)
        return [*command[:at], begin + command[at], *command[at + 1 :]]


_ties: _Ties | None = None


def end_with_this_process() -> None:
    """From now on, what multiprocessing starts here, and what that forks in turn, is killed when its parent ends."""
    global _ties
    if _ties is not None or not hasattr(ctypes.CDLL(None), "prctl"):  # Linux alone has it
        return
    ties = _ties = _Ties()
    os.register_at_fork(before=ties.note)
    util.register_after_fork(ties, _Ties.forked)
    command_line = spawn.get_command_line
    spawn.get_command_line = lambda **handles: ties.spawned(command_line(**handles))
