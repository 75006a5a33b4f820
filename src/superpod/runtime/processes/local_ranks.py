"""Wait for the local ranks that this process has started, and forward stop signals to them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from superpod.runtime.processes import watchdog
from superpod.runtime.processes.attempt_processes import descendants, ranks_of, send

GRACE_S = 120
"""Seconds that the ranks may take to save and exit after a stop signal."""

POLL_S = 0.2

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Sent by Ctrl-C, by kill, and when the terminal is closed."""


def wait_for_all(stop: StopSignal, tick: Callable[..., None]) -> None:
    """Wait until all descendants of this process (torchrun, ranks) have exited; forward stop signals to the ranks.

    `tick` is called five times per second without an argument, and with a message when the ranks are told to stop.
    """
    stopping_since = 0.0
    while True:
        children = descendants(os.getpid())
        for pid in watchdog.pids:  # they exit with this process, after the ranks
            children.pop(pid, None)
        tick()
        if not children:
            return
        if stop.received > 1 or (stopping_since and time.monotonic() - stopping_since > GRACE_S):
            send(children, signal.SIGKILL)
        elif stop.received and not stopping_since:
            tick("stopping: the ranks finish their step and save (press Ctrl-C again to kill them without saving)")
            send(ranks_of(children) or children, signal.SIGTERM)
            stopping_since = time.monotonic()
        time.sleep(POLL_S)


class StopSignal:
    """Counts the stop signals that arrive in `handle_signals`: `received` is their number.

    It replaces NeMo-Run's handlers, which raise exceptions. A closed terminal (SIGHUP) counts, unless SIGHUP is ignored
    (nohup).
    """

    def __init__(self) -> None:
        self.received = 0

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Count stop signals while the block runs."""
        numbers = [n for n in STOPS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
        old_handlers = {number: signal.signal(number, self._count) for number in numbers}
        try:
            yield
        finally:
            for number, handler in old_handlers.items():
                signal.signal(number, handler)

    def _count(self, number: int, frame: object) -> None:
        self.received += 1
