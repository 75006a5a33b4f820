"""Single keys from the terminal, without an echo, while a page is shown."""

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
    """A context in which keys arrive at once; afterwards the terminal is as it was. Without one there are no keys."""

    def __init__(self) -> None:
        self._handle = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        self._before: list[Any] | None = None
        self._typed: list[str] = []

    def __enter__(self) -> Keys:
        """Switch echo and line editing off; Ctrl-C still interrupts."""
        if self._handle >= 0:
            self._before = termios.tcgetattr(self._handle)
            tty.setcbreak(self._handle, termios.TCSADRAIN)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Restore the terminal, and drop what was typed."""
        if self._before is not None:
            termios.tcsetattr(self._handle, termios.TCSAFLUSH, self._before)

    def wait(self, seconds: float) -> str:
        """The name of a key pressed within so many seconds; '' if there is none, or another."""
        if self._handle < 0:
            time.sleep(seconds)
            return ""
        if self._typed:
            return self._typed.pop(0)
        if not select.select([self._handle], [], [], seconds)[0]:
            return ""
        typed = os.read(self._handle, 64)
        if not typed:  # the terminal is gone
            time.sleep(seconds)
        self._typed = [NAMES[key] for key in _KEY.findall(typed)]  # several, where they came while a page was drawn
        return self._typed.pop(0) if self._typed else ""
