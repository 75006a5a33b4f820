"""Forward the output of a process with secrets removed, since errors in a user's file may contain a token."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from superpod.common.redaction import LineRedactor

END_S = 5.0
"""Maximum seconds to wait for the remaining output: running child processes may keep the pipe open."""


@contextmanager
def forward_output(process: subprocess.Popen[str]) -> Iterator[None]:
    """Print stdout and stderr of a process during the block, line by line and without secrets."""
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
    """Copy lines from `source` to `sink` without secrets, until `source` is closed."""
    redacted = LineRedactor()
    with source:
        for line in source:
            try:
                end = "\n" if line.endswith("\n") else ""
                sink.write(redacted(line.removesuffix("\n")) + end)
                sink.flush()
            except (OSError, ValueError):  # our output is closed; keep reading, so that the process does not block
                continue
