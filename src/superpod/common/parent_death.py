"""Processes that end when the process that started them is gone, however it ends. Standard library only, Python 3.9.

`end_with_parent` is called in a helper, such as the worker of a pool, that runs Python all the time.
`kill_children_with_this_process` is called in the parent, for children that may hang outside Python or have children of
their own: they ask the kernel for a signal at their parent's death (prctl(2), PR_SET_PDEATHSIG). A rank that is killed
cannot end its checkpoint writers: one would go on writing into a checkpoint that the next attempt saves under the same
name, and Megatron's manager of its writers (multiprocessing.Manager) waits for requests for ever. What a rank starts in
another way, from a thread or as a program, is ended by runtime/processes/stray_processes.py.
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
"""Seconds between two looks at the parent."""

_PR_SET_PDEATHSIG = 1

_SPAWNED = """\
import ctypes, os; ctypes.CDLL(None).prctl({option}, {number}, 0, 0, 0); os.getppid() == {parent} or os._exit(1); """
"""Put before the code of a spawned child."""


def end_with_parent() -> None:
    """End this process within seconds of its parent, however that ends: kill -9 lets no handler of the parent run."""
    started_by = multiprocessing.parent_process()  # right even where that is gone already
    parent = started_by.pid if started_by and started_by.pid else os.getppid()
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(1)


class _ChildHooks:
    """What runs when multiprocessing starts a child of this process."""

    def __init__(self) -> None:
        self._prctl = ctypes.CDLL(None).prctl
        self._parent, self._sets_signal = 0, False

    def note(self) -> None:
        """Before a child is started, in the parent."""
        self._parent = os.getpid()
        # The kernel's parent is a thread: a child that another one starts would be killed when that thread ends.
        self._sets_signal = threading.get_native_id() == self._parent

    def forked(self) -> None:
        """In a child that multiprocessing has forked."""
        if self._sets_signal:
            self._prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != self._parent:  # it died in between
                os._exit(1)

    def spawned(self, command: list[str]) -> list[str]:
        """The command of a child that multiprocessing spawns, as its parent starts it."""
        self.note()
        if not self._sets_signal or "-c" not in command:
            return command
        at = command.index("-c") + 1
        begin = _SPAWNED.format(option=_PR_SET_PDEATHSIG, number=int(signal.SIGKILL), parent=self._parent)
        return [*command[:at], begin + command[at], *command[at + 1 :]]


_hooks: _ChildHooks | None = None


def kill_children_with_this_process() -> None:
    """From now on, what multiprocessing starts here, and what that forks in turn, is killed when its parent ends."""
    global _hooks
    if _hooks is not None or not hasattr(ctypes.CDLL(None), "prctl"):  # Linux alone has it
        return
    hooks = _hooks = _ChildHooks()
    os.register_at_fork(before=hooks.note)
    util.register_after_fork(hooks, _ChildHooks.forked)
    command_line = spawn.get_command_line
    spawn.get_command_line = lambda **handles: hooks.spawned(command_line(**handles))
