"""Stream the events of a Chrome trace, so that a file of several gigabytes needs only megabytes of memory.

The format is Google's "Trace Event Format": an object with a list `traceEvents`, or only the list.
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
"""Characters per read."""
MAX_CHARS = 1 << 26
"""Maximum number of characters in one event, and before the first event."""
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
EXPORT = "specify a complete file written by export_chrome_trace of torch.profiler"


class Trace:
    """A Chrome trace. `head` contains the fields before the events as soon as `events` has yielded the first one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head: dict[str, Any] = {}

    def events(self) -> Iterator[TraceEvent]:
        """Yield all events in the order of the file.

        Raises:
            UserError: the file cannot be read, is not a trace, or is truncated.
        """
        try:
            with _open(self.path) as file:
                yield from self._events(file)
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror or error}", EXPORT) from error
        except (EOFError, zlib.error) as error:
            raise UserError(f"{self.path} is corrupt: its compressed data is truncated", EXPORT) from error

    def _events(self, file: IO[str]) -> Iterator[TraceEvent]:
        buffer, offset = self._read_head(file), 0
        decode, read = json.JSONDecoder().raw_decode, 0
        while True:
            match = _BETWEEN.match(buffer, offset)
            offset = match.end() if match else offset
            if buffer.startswith("]", offset):
                return
            try:
                event, end = decode(buffer, offset)
                if end == len(buffer) and not isinstance(event, dict):
                    raise ValueError  # a number may continue in the next block
                offset = end
            except (ValueError, RecursionError) as error:
                next_block = file.read(BLOCK)
                if not next_block or len(buffer) - offset > MAX_CHARS or isinstance(error, RecursionError):
                    problem = "an event is not valid JSON" if next_block else "it is truncated"
                    raise UserError(f"{self.path} is corrupt after {read:,} events: {problem}", EXPORT) from None
                buffer, offset = buffer[offset:] + next_block, 0
                continue
            if isinstance(event, dict):
                read += 1
                yield event

    def _read_head(self, file: IO[str]) -> str:
        """Read the file up to the first event, and return the text from there on."""
        text = file.read(BLOCK)
        if not text.strip():
            raise UserError(f"{self.path} is empty", EXPORT)
        if text.lstrip().startswith("["):
            return text.lstrip()[1:]
        if not text.lstrip().startswith("{"):
            raise UserError(f"{self.path} is not a trace: it does not start with JSON", EXPORT)
        match = _EVENTS.search(text)
        while not match:
            next_block = file.read(BLOCK)
            if not next_block or len(text) > MAX_CHARS:
                raise UserError(f"{self.path} is not a trace: it has no list `traceEvents`", EXPORT)
            text += next_block
            match = _EVENTS.search(text)
        with contextlib.suppress(ValueError, RecursionError):
            self.head = json.loads(text[: match.end()] + "]}")
        return text[match.end() :]


def _open(path: Path) -> IO[str]:
    """Open a text file, which may be compressed with gzip."""
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    if is_gzip:
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    return path.open(encoding="utf-8", errors="replace")
