"""A rank's sign of life: a line at each change of phase, at most one per `every_s` in between, and one from a thread
when nothing happens, which distinguishes a rank that waits from one that is gone."""

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

from .files import JsonObject, append_line

IDLE_S = 5.0
"""Seconds of silence after which the thread writes."""


class Heartbeat:
    """Writes `heartbeat/{rank}.jsonl`: t, step, phase, host; `moved` is when the training last came to a new place."""

    def __init__(self, folder: Path, rank: int, every_s: float) -> None:
        self._path = folder / f"{rank}.jsonl"
        self._every_s = every_s
        self._last: JsonObject = {}
        self._moved = 0.0
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._idle, name="heartbeat", daemon=True)

    def begin(self) -> None:
        """Start the thread, once; a rank whose process is stopped or gone writes nothing from then on."""
        if not self._thread.is_alive():
            self._thread.start()

    def end(self) -> None:
        """Stop the thread."""
        self._end.set()

    @property
    def phase(self) -> str:
        """The phase written last."""
        return str(self._last.get("phase", ""))

    def beat(self, step: int, phase: str, **facts: object) -> None:
        """Note a new place of the training; written when the phase has changed, or `every_s` after the last line."""
        now = self._moved = time.time()
        if phase == self._last.get("phase") and now - self._last["t"] < self._every_s:
            return
        with self._lock:
            self._write({"t": now, "step": step, "phase": phase, "host": socket.gethostname(), **facts})

    def _write(self, line: JsonObject) -> None:
        self._last = line
        with contextlib.suppress(OSError):  # a lost heartbeat is no reason to end a training
            append_line(self._path, line)

    def _idle(self) -> None:
        pid = os.getpid()
        while not self._end.wait(1.0) and os.getpid() == pid:
            with self._lock:
                now = time.time()
                if self._last and now - self._last["t"] >= IDLE_S:
                    kept = {k: self._last[k] for k in ("step", "phase", "host") if k in self._last}
                    self._write({"t": now, **kept, "moved": self._moved})
