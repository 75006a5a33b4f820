"""Reads single key presses from the terminal without echoing them, while a full-screen page is shown."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import time
import tty
from types import TracebackType
from typing import Any

NAMES = {b"q": "q", b"Q": "q", b"\x1b[A": "up", b"k": "up", b"\x1b[B": "down", b"j": "down"}
_KEY = re.compile(b"|".join(map(re.escape, NAMES)))


class Keys:
    """Context manager for reading key presses: cbreak mode inside, the previous terminal mode afterwards.

    If stdin is not a terminal, no keys are read.
    """

    def __init__(self) -> None:
        self._handle = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        self._before: list[Any] | None = None
        self._typed: list[str] = []

    def __enter__(self) -> Keys:
        """Turn off echo and line buffering; Ctrl-C still raises KeyboardInterrupt."""
        if self._handle >= 0:
            self._before = termios.tcgetattr(self._handle)
            tty.setcbreak(self._handle, termios.TCSADRAIN)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Restore the terminal mode and discard unread input."""
        if self._before is not None:
            termios.tcsetattr(self._handle, termios.TCSAFLUSH, self._before)

    def wait(self, seconds: float) -> str:
        """Wait up to `seconds` for a key; return "q", "up" or "down", or "" for no key or any other key."""
        if self._handle < 0:
            time.sleep(seconds)
            return ""
        if self._typed:
            return self._typed.pop(0)
        if not select.select([self._handle], [], [], seconds)[0]:
            return ""
        typed_bytes = os.read(self._handle, 64)
        if not typed_bytes:  # the terminal was closed
            time.sleep(seconds)
        self._typed = [NAMES[key] for key in _KEY.findall(typed_bytes)]  # several keys may arrive while a page is drawn
        return self._typed.pop(0) if self._typed else ""
