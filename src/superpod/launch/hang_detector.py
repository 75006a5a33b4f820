"""Ends a run on this machine when its ranks make no more steps, and names the rank that stopped first."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

from superpod.errors import UserError
from superpod.runtime.heartbeat import heartbeat, stall
from superpod.runtime.processes.attempt_processes import find, send
from superpod.runtime.rank import stacks
from superpod.runtime.runs.run_folder import Attempt
from superpod.runtime.runs.run_state import State


class HangDetector:
    """Watches the ranks of an attempt; `stalled` says which rank stopped first and where, None while all is well."""

    def __init__(self, attempt: Attempt, limit_s: float | None = None) -> None:
        self.attempt = attempt
        self.stalled: str | None = None
        self.limit_s = float(os.environ.get(heartbeat.LIMIT, "600")) if limit_s is None else limit_s
        self._watch = stall.Watch(attempt, self.limit_s, time.time())

    def also_looking(self, tick: Callable[..., None]) -> Callable[..., None]:
        """A `tick` that also calls `look`."""

        def both(*words: str) -> None:
            tick(*words)
            self.look()

        return both

    def look(self) -> None:
        """End the attempt when a rank has made no progress for too long."""
        if self.stalled:
            return
        self.stalled = self._watch.look()
        if self.stalled:
            stacks.ask([*find(self.attempt.path)], self.attempt)
            self.stalled = stacks.joined(self.stalled, self.attempt)
            with contextlib.suppress(UserError):
                self.attempt.mark(State.STALLED, message=self.stalled)
            send(find(self.attempt.path), signal.SIGKILL)
