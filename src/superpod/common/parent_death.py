"""Terminate child processes when their parent ends, even if it is killed. Standard library only, Python 3.9.

Call `end_with_parent` in a child that always runs Python code, such as a pool worker. Call
`kill_children_with_this_process` in the parent of children that may hang outside Python or have their own children: it
uses the parent-death signal of the kernel (prctl(2), PR_SET_PDEATHSIG). A killed rank cannot stop its
checkpoint writers: they would continue to write to a checkpoint that the next attempt saves under the same name, and
the multiprocessing.Manager that Megatron uses for the writers would wait for requests forever. Processes that a rank
starts in a different way, from a thread or as a program, are terminated by runtime/processes/stray_processes.py.
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
"""Interval in seconds at which a child checks its parent."""

_PR_SET_PDEATHSIG = 1

_SPAWNED = """\
import ctypes, os; ctypes.CDLL(None).prctl({option}, {number}, 0, 0, 0); os.getppid() == {parent} or os._exit(1); """
"""Code that a spawned child process runs before its own."""


def end_with_parent() -> None:
    """Start a thread that ends this process within seconds after its parent ends, even if SIGKILL killed the parent."""
    started_by = multiprocessing.parent_process()  # correct even if the parent has already ended
    parent = started_by.pid if started_by and started_by.pid else os.getppid()
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(1)


class _ChildHooks:
    """Hooks called by multiprocessing when it starts a child of this process."""

    def __init__(self) -> None:
        self._prctl = ctypes.CDLL(None).prctl
        self._parent, self._sets_signal = 0, False

    def record_parent(self) -> None:
        """Record the parent; called in the parent before it starts a child."""
        self._parent = os.getpid()
        # For the kernel, the parent is a thread: a child of another thread would be killed when that thread ends.
        self._sets_signal = threading.get_native_id() == self._parent

    def set_signal(self) -> None:
        """Set the parent-death signal; called in a child that multiprocessing has forked."""
        if self._sets_signal:
            self._prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != self._parent:  # the parent died before the call
                os._exit(1)

    def add_signal(self, command: list[str]) -> list[str]:
        """Return the command line of a child to spawn, with code that sets the parent-death signal."""
        self.record_parent()
        if not self._sets_signal or "-c" not in command:
            return command
        index = command.index("-c") + 1
        begin = _SPAWNED.format(option=_PR_SET_PDEATHSIG, number=int(signal.SIGKILL), parent=self._parent)
        return [*command[:index], begin + command[index], *command[index + 1 :]]


_hooks: _ChildHooks | None = None


def kill_children_with_this_process() -> None:
    """Let the kernel kill children that multiprocessing starts from now on, and their forks, when their parent ends."""
    global _hooks
    if _hooks is not None or not hasattr(ctypes.CDLL(None), "prctl"):  # only Linux has prctl
        return
    hooks = _hooks = _ChildHooks()
    os.register_at_fork(before=hooks.record_parent)
    util.register_after_fork(hooks, _ChildHooks.set_signal)
    command_line = spawn.get_command_line
    spawn.get_command_line = lambda **handles: hooks.add_signal(command_line(**handles))
