"""Makes child processes end when their parent ends, even if it is killed. Standard library only, Python 3.9.

`end_with_parent` is called in a child, such as a pool worker, that runs Python code all the time.
`kill_children_with_this_process` is called in the parent, for children that may hang outside Python or have children of
their own; it uses the kernel's parent-death signal (prctl(2), PR_SET_PDEATHSIG). A killed rank cannot stop its
checkpoint writers: they would continue to write to a checkpoint that the next attempt saves under the same name, and
Megatron's manager of the writers (multiprocessing.Manager) would wait for requests forever. Processes that a rank
starts in another way, from a thread or as a program, are ended by runtime/processes/stray_processes.py.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing import spawn, util

POLL_S = 1.0
"""Seconds between two checks of the parent."""

_PR_SET_PDEATHSIG = 1

_SPAWNED = """\
import ctypes, os; ctypes.CDLL(None).prctl({option}, {number}, 0, 0, 0); os.getppid() == {parent} or os._exit(1); """
"""Code that a spawned child runs first."""


def end_with_parent() -> None:
    """End this process within seconds after its parent has ended, even by SIGKILL."""
    started_by = multiprocessing.parent_process()  # correct even if the parent has already ended
    parent = started_by.pid if started_by and started_by.pid else os.getppid()
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(1)


class _ChildHooks:
    """Hooks that multiprocessing calls when it starts a child of this process."""

    def __init__(self) -> None:
        self._prctl = ctypes.CDLL(None).prctl
        self._parent, self._sets_signal = 0, False

    def note(self) -> None:
        """Record the parent; called in the parent before a child is started."""
        self._parent = os.getpid()
        # For the kernel, the parent is a thread: a child started by another thread would be killed when that one ends.
        self._sets_signal = threading.get_native_id() == self._parent

    def forked(self) -> None:
        """Set the parent-death signal; called in a child that multiprocessing has forked."""
        if self._sets_signal:
            self._prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != self._parent:  # the parent died before the call
                os._exit(1)

    def spawned(self, command: list[str]) -> list[str]:
        """Return the command line of a spawned child with code that sets the parent-death signal."""
        self.note()
        if not self._sets_signal or "-c" not in command:
            return command
        at = command.index("-c") + 1
        begin = _SPAWNED.format(option=_PR_SET_PDEATHSIG, number=int(signal.SIGKILL), parent=self._parent)
        return [*command[:at], begin + command[at], *command[at + 1 :]]


_hooks: _ChildHooks | None = None


def kill_children_with_this_process() -> None:
    """Make children that multiprocessing starts from now on, and their forks, be killed when their parent ends."""
    global _hooks
    if _hooks is not None or not hasattr(ctypes.CDLL(None), "prctl"):  # only Linux has prctl
        return
    hooks = _hooks = _ChildHooks()
    os.register_at_fork(before=hooks.note)
    util.register_after_fork(hooks, _ChildHooks.forked)
    command_line = spawn.get_command_line
    spawn.get_command_line = lambda **handles: hooks.spawned(command_line(**handles))
