"""The events of a Chrome trace one after the other, so that a file of gigabytes takes megabytes of memory.

The format is Google's "Trace Event Format": an object with a list `traceEvents`, or the list alone. Standard library.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeAlias

from superpod.errors import UserError

TraceEvent: TypeAlias = dict[str, Any]

BLOCK = 1 << 22
"""Characters that are read at once."""
LARGEST = 1 << 26
"""Characters of one event, and of what stands before the first; more is no trace."""
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
EXPORT = "take the file that torch.profiler's export_chrome_trace wrote, whole"


class Trace:
    """A trace that is being read: `head` are the fields before the events, once the first event was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head: dict[str, Any] = {}

    def events(self) -> Iterator[TraceEvent]:
        """Every event, in the file's order.

        Raises:
            UserError: the file cannot be read, is no such trace, or ends in the middle.
        """
        try:
            with _opened(self.path) as file:
                yield from self._events(file)
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror or error}", EXPORT) from error
        except (EOFError, zlib.error) as error:
            raise UserError(f"{self.path} is damaged: its compression breaks off", EXPORT) from error

    def _events(self, file: IO[str]) -> Iterator[TraceEvent]:
        buffer, at = self._to_first(file), 0
        decode, read = json.JSONDecoder().raw_decode, 0
        while True:
            match = _BETWEEN.match(buffer, at)
            at = match.end() if match else at
            if buffer.startswith("]", at):
                return
            try:
                event, end = decode(buffer, at)
                if end == len(buffer) and not isinstance(event, dict):
                    raise ValueError  # a number may go on in the next block
                at = end
            except (ValueError, RecursionError) as error:
                more = file.read(BLOCK)
                if not more or len(buffer) - at > LARGEST or isinstance(error, RecursionError):
                    broken = "it ends in the middle" if not more else "an event is no JSON"
                    raise UserError(f"{self.path} is damaged after {read:,} events: {broken}", EXPORT) from None
                buffer, at = buffer[at:] + more, 0
                continue
            if isinstance(event, dict):
                read += 1
                yield event

    def _to_first(self, file: IO[str]) -> str:
        """Read up to the first event; returns what is read from there on."""
        text = file.read(BLOCK)
        if not text.strip():
            raise UserError(f"{self.path} is empty", EXPORT)
        if text.lstrip().startswith("["):
            return text.lstrip()[1:]
        if not text.lstrip().startswith("{"):
            raise UserError(f"{self.path} is no trace: it does not begin as JSON does", EXPORT)
        while not (match := _EVENTS.search(text)):
            more = file.read(BLOCK)
            if not more or len(text) > LARGEST:
                raise UserError(f"{self.path} is no trace: it has no list `traceEvents`", EXPORT)
            text += more
        with contextlib.suppress(ValueError, RecursionError):
            self.head = json.loads(text[: match.end()] + "]}")
        return text[match.end() :]


def _opened(path: Path) -> IO[str]:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    if packed:
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    return path.open(encoding="utf-8", errors="replace")
