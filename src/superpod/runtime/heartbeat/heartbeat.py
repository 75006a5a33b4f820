"""Publish the heartbeats of ranks with one write per node to the shared file system every `every_s` seconds.

The ranks of a node store their progress in a small file in shared memory (`node_board.py`). A thread of the lowest rank
that is still running writes the records of all ranks to the node's page in `heartbeat/nodes`. If that rank is killed or
stopped, the next rank takes over.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from superpod.common.json_files import JsonObject
from superpod.runtime.heartbeat import heartbeat_pages as pages
from superpod.runtime.heartbeat.heartbeat_pages import RankLocation
from superpod.runtime.heartbeat.node_board import NodeBoard

TICK_S = 1.0
"""Seconds between two heartbeats in shared memory."""

MAX_WRITE_INTERVAL_S, CHECKS_PER_TIMEOUT, WRITES_PER_S = 15.0, 20, 100
"""A node writes at least every MAX_WRITE_INTERVAL_S seconds and CHECKS_PER_TIMEOUT times per stall timeout, unless all
nodes together would then write more than WRITES_PER_S times per second."""

LIMIT = "SUPERPOD_STALLED_S"
"""Environment variable with the stall timeout: maximum seconds between two training steps; default 600."""

ENDED_PHASES = ("done", "stopped", "ended", "failed")


def write_every_s(limit_s: float, nodes: int) -> float:
    """Return the seconds between two writes of a node: short enough for the stall timeout `limit_s`, but with at most
    WRITES_PER_S writes of all `nodes` nodes per second. 15 s for 600 s, 20 s for 600 s and 2,048 nodes.
    """
    return max(min(limit_s / CHECKS_PER_TIMEOUT, MAX_WRITE_INTERVAL_S), min(nodes / WRITES_PER_S, limit_s / 3))


def locate_rank(rank: int, environ: Mapping[str, str]) -> RankLocation:
    """Return the location of the rank with global rank `rank` from torchrun's variables.

    Without these variables, each rank counts as a node of its own.
    """
    local_size = int(environ.get("LOCAL_WORLD_SIZE") or 1)
    node = int(environ.get("GROUP_RANK") or rank // local_size)
    local_rank = int(environ.get("LOCAL_RANK") or rank % local_size)
    return RankLocation(node, local_rank, max(local_size, local_rank + 1), int(environ.get("WORLD_SIZE") or 0))


class Heartbeat:
    """Publishes the time, step, phase, host, `moved` (time of the last progress) and further facts of a rank.

    A heartbeat that cannot be written is lost, but does not end the training.

    Args:
        folder: the `heartbeat` folder of the attempt.
        rank: the global rank.
        every_s: seconds between two writes; None = from the stall timeout, 0 = write every heartbeat.
        place: the node and local rank; None = from the environment.
    """

    def __init__(
        self, folder: Path, rank: int, every_s: float | None = None, place: RankLocation | None = None
    ) -> None:
        self.rank, self.place = rank, place or locate_rank(rank, os.environ)
        nodes = max(1, self.place.size // self.place.local_size)
        needed_s = write_every_s(float(os.environ.get(LIMIT) or 600), nodes)
        self.every_s = needed_s if every_s is None else every_s
        self._tick_s = min(TICK_S, self.every_s) or TICK_S
        self._board = NodeBoard(folder, self.place)
        self._file, self._path, self._host = -1, folder / pages.NAME, socket.gethostname()
        self._step, self._phase, self._moved, self._save_s = 0, "", 0.0, 0.0
        self._facts: JsonObject = {}
        self._record = b""
        self._beating, self._writing = threading.Lock(), threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._tick_until_stopped, name="heartbeat", daemon=True)

    def begin(self) -> None:
        """Start the thread that writes heartbeats, unless it is running."""
        if not self._thread.is_alive():
            self._thread.start()

    def end(self) -> None:
        """Stop the thread; if all ranks of the node have ended, remove their file in shared memory."""
        self._end.set()
        if self._phase in ENDED_PHASES and self._board.all_ranks_in(ENDED_PHASES):
            self._board.remove()

    @property
    def phase(self) -> str:
        """The phase of the last heartbeat."""
        return self._phase

    def beat(self, step: int, phase: str, save_s: float = 0.0, **facts: object) -> None:
        """Record that the rank has reached a step or phase, with further `facts` as JSON values.

        `save_s` is the duration of a save in seconds; heartbeats contain the longest one. Only the end of a rank is
        written immediately, since its process may exit next. Steps never wait for the file system.
        """
        if phase in ENDED_PHASES:
            with self._writing:  # afterwards, this rank's thread cannot overwrite another rank's end
                self._record_progress(step, phase, save_s, facts)
        else:
            self._record_progress(step, phase, save_s, facts)
        if not self.every_s or phase == "failed" or (phase in ENDED_PHASES and self._board.all_ranks_in(ENDED_PHASES)):
            self._write(self._moved)

    def _record_progress(self, step: int, phase: str, save_s: float, facts: JsonObject) -> None:
        with self._beating:
            is_new = phase != self._phase
            self._facts = facts if is_new else {**self._facts, **facts}
            self._step, self._phase, self._moved = step, phase, time.time()
            self._save_s = max(self._save_s, save_s)
            self._publish(self._moved)
        if is_new and self.rank == 0 and self._board.due:
            self._board.set_due(self._moved)  # at the next tick, since `recipes status` shows the phase of rank 0

    def tick(self, now: float) -> None:
        """Update the heartbeat in shared memory at Unix time `now`; if a write is due, write the node's page."""
        with self._beating:
            if not self._phase:
                return
            self._publish(now)
        turn = self.place.local_rank * self._tick_s if self.every_s else 0.0
        is_early = now < self._board.due + turn <= now + self.every_s + turn  # False if the clock was set back
        if not is_early and self._phase not in ENDED_PHASES:
            self._write(now)

    def _publish(self, now: float) -> None:
        facts = {**self._facts, "save_s": self._save_s} if self._save_s else self._facts
        self._record = pages.record(self.rank, self._step, self._phase, now, self._moved, facts)
        self._board.put(self._record)

    def _write(self, now: float) -> None:
        """Write the node's page. Does not hold `_beating`, so that steps never wait for a file system that hangs."""
        with self._writing:
            # All nodes start at the same time: shorten the first interval by a different share on each node.
            share = 1.0 if self._board.due else 0.382 + 0.618 * (self.place.node * 0.618 % 1)
            self._board.set_due(now + share * self.every_s)
            head = pages.header(self.place, now, self._host)
            try:
                if self._file < 0:
                    # O_DSYNC: otherwise an NFS client may cache the page for up to 30 s.
                    self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_DSYNC | os.O_CLOEXEC, 0o644)
                for data, at in self._board.compose(head, self._record):
                    os.pwrite(self._file, data, at)
            except OSError:
                self._close()  # reopened next time, since the handle may be stale

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._file)
        self._file = -1

    def _tick_until_stopped(self) -> None:
        pid = os.getpid()
        while not self._end.wait(self._tick_s) and os.getpid() == pid:
            self.tick(time.time())
