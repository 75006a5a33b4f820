"""Terminate a local run when its ranks make no progress, and report the rank that stopped first."""

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
    """Watches the ranks of a local attempt. `stalled` is None until they stall, then a message with the first rank.

    `limit_s` is the stall timeout in seconds; None = from the environment.
    """

    def __init__(self, attempt: Attempt, limit_s: float | None = None) -> None:
        self.attempt = attempt
        self.stalled: str | None = None
        self.limit_s = float(os.environ.get(heartbeat.LIMIT, "600")) if limit_s is None else limit_s
        self._stall_detector = stall.StallDetector(attempt, self.limit_s, time.time())

    def add_check(self, tick: Callable[..., None]) -> Callable[..., None]:
        """Return a function that calls `tick` with its arguments and then `check`."""

        def tick_and_check(*messages: str) -> None:
            tick(*messages)
            self.check()

        return tick_and_check

    def check(self) -> None:
        """If the attempt has stalled, record it with the stacks of the ranks, and kill its processes."""
        if self.stalled:
            return
        self.stalled = self._stall_detector.check()
        if self.stalled:
            stacks.request_stacks([*find(self.attempt.path)], self.attempt)
            self.stalled = stacks.describe_stall(self.stalled, self.attempt)
            with contextlib.suppress(UserError):
                self.attempt.mark(State.STALLED, message=self.stalled)
            send(find(self.attempt.path), signal.SIGKILL)
