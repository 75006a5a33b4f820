"""Forward the output of a process with secrets removed: errors in a user's file may contain a token."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from superpod.common.redaction import LineRedactor

END_S = 5.0
"""Seconds to wait for the remaining output: child processes that are still running may keep the pipe open."""


@contextmanager
def forward_output(process: subprocess.Popen[str]) -> Iterator[None]:
    """Print the redacted output of a process, line by line, until it ends."""
    pairs = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    threads = [threading.Thread(target=_copy_lines, args=pair, daemon=True) for pair in pairs if pair[0]]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join(END_S)


def _copy_lines(source: IO[str], sink: IO[str]) -> None:
    redacted = LineRedactor()
    with source:
        for line in source:
            try:
                end = "\n" if line.endswith("\n") else ""
                sink.write(redacted(line.removesuffix("\n")) + end)
                sink.flush()
            except (OSError, ValueError):  # our output is closed; keep reading, so that the process does not block
                continue
