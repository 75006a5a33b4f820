"""A rank's sign of life, which costs the shared folder one write a node every `every_s`, however many steps it makes.

The ranks of a node leave their newest place in a small file in the node's memory (`node_board.py`). A thread of one of
them puts all of it into the node's page of `heartbeat/nodes`: of whichever comes first when a write is due, which is
the lowest rank that still runs. So none of them is needed: not when it is killed, nor when it is stopped.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from superpod.common.files import JsonObject
from superpod.runtime.heartbeat import heartbeat_pages as pages
from superpod.runtime.heartbeat.heartbeat_pages import Place
from superpod.runtime.heartbeat.node_board import NodeBoard

TICK_S = 1.0
"""Seconds between two signs of life that a rank leaves in its node's memory."""

LONGEST_S, LOOKS, WRITES_PER_S = 15.0, 20, 100
"""A node writes every LONGEST_S seconds; LOOKS times within a shorter limit; all nodes WRITES_PER_S times a second."""

LIMIT = "SUPERPOD_STALLED_S"
"""Seconds that a training rank may take between two steps, for whoever watches; 600 where it is not set."""

ENDED = ("done", "stopped", "ended", "failed")


def write_every_s(limit_s: float, nodes: int) -> float:
    """Seconds between two writes of a node, so that a stall of `limit_s` is seen in time and the file system has rest.

    15 s by the default limit of 600 s: 2,048 nodes write 100 times a second, a small file system's share.
    """
    return max(min(limit_s / LOOKS, LONGEST_S), min(nodes / WRITES_PER_S, limit_s / 3))


def place_of(rank: int, environ: Mapping[str, str]) -> Place:
    """Where this rank runs, from torchrun's variables; without them, a rank is a node."""
    local_size = int(environ.get("LOCAL_WORLD_SIZE") or 1)
    node = int(environ.get("GROUP_RANK") or rank // local_size)
    local_rank = int(environ.get("LOCAL_RANK") or rank % local_size)
    return Place(node, local_rank, max(local_size, local_rank + 1), int(environ.get("WORLD_SIZE") or 0))


class Heartbeat:
    """Leaves t, step, phase, host, `moved` (when the training last came to a new place) and facts of one rank.

    `every_s` is None for what the limit in the environment needs, 0 for a write at every beat. A beat that cannot be
    written is lost: that is no reason to end a training.
    """

    def __init__(self, folder: Path, rank: int, every_s: float | None = None, place: Place | None = None) -> None:
        self.rank, self.place = rank, place or place_of(rank, os.environ)
        nodes = max(1, self.place.size // self.place.local_size)
        needed = write_every_s(float(os.environ.get(LIMIT) or 600), nodes)
        self.every_s = needed if every_s is None else every_s
        self._tick_s = min(TICK_S, self.every_s) or TICK_S
        self._board = NodeBoard(folder, self.place)
        self._file, self._path, self._host = -1, folder / pages.NAME, socket.gethostname()
        self._step, self._phase, self._moved, self._save_s = 0, "", 0.0, 0.0
        self._facts: JsonObject = {}
        self._record = b""
        self._beating, self._writing = threading.Lock(), threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)

    def begin(self) -> None:
        """Start the thread, once; a rank whose process is stopped or gone leaves nothing from then on."""
        if not self._thread.is_alive():
            self._thread.start()

    def end(self) -> None:
        """Stop the thread, and give back the node's memory when this was its last rank."""
        self._end.set()
        if self._phase in ENDED and self._board.all_in(ENDED):
            self._board.remove()

    @property
    def phase(self) -> str:
        """The phase of the last beat."""
        return self._phase

    def beat(self, step: int, phase: str, save_s: float = 0.0, **facts: object) -> None:
        """Note a new place of the training; of several `save_s`, the longest is kept.

        Only an end is written here and now, since the process may be gone next; a step waits for no file system.
        """
        if phase in ENDED:
            with self._writing:  # after it, this rank's thread writes no page that may lack another rank's end
                self._note(step, phase, save_s, facts)
        else:
            self._note(step, phase, save_s, facts)
        if not self.every_s or phase == "failed" or (phase in ENDED and self._board.all_in(ENDED)):
            self._write(self._moved)

    def _note(self, step: int, phase: str, save_s: float, facts: JsonObject) -> None:
        with self._beating:
            is_new = phase != self._phase
            self._facts = facts if is_new else {**self._facts, **facts}
            self._step, self._phase, self._moved = step, phase, time.time()
            self._save_s = max(self._save_s, save_s)
            self._leave(self._moved)
        if is_new and self.rank == 0 and self._board.due:
            self._board.set_due(self._moved)  # by the next tick: `recipes status` shows the phase of rank 0

    def tick(self, now: float) -> None:
        """Leave a sign of life, and write the node's page when that is due and no other rank has done so."""
        with self._beating:
            if not self._phase:
                return
            self._leave(now)
        turn = self.place.local_rank * self._tick_s if self.every_s else 0.0
        waits = now < self._board.due + turn <= now + self.every_s + turn  # false too once a clock is set back
        if not waits and self._phase not in ENDED:
            self._write(now)

    def _leave(self, now: float) -> None:
        facts = {**self._facts, "save_s": self._save_s} if self._save_s else self._facts
        self._record = pages.record(self.rank, self._step, self._phase, now, self._moved, facts)
        self._board.put(self._record)

    def _write(self, now: float) -> None:
        """Write the node's page. `_beating` is not held, so that a file system that hangs holds up no step."""
        with self._writing:
            spread = 1.0 if self._board.due else 0.382 + 0.618 * (self.place.node * 0.618 % 1)  # nodes start together
            self._board.set_due(now + spread * self.every_s)
            head = pages.header(self.place, now, self._host)
            try:
                if self._file < 0:
                    # O_DSYNC: an NFS client would keep the page to itself for up to 30 s.
                    self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_DSYNC | os.O_CLOEXEC, 0o644)
                for data, at in self._board.compose(head, self._record):
                    os.pwrite(self._file, data, at)
            except OSError:
                self._close()  # it may have gone stale: opened anew next time

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._file)
        self._file = -1

    def _work(self) -> None:
        pid = os.getpid()
        while not self._end.wait(self._tick_s) and os.getpid() == pid:
            self.tick(time.time())
