"""What a process prints, passed on without secrets: it may run a user's file, whose errors may cite a token."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from superpod.common.redaction import LineRedactor

END_S = 5.0
"""How long its last words are waited for: what it has left running may hold its output open."""


@contextmanager
def forward_output(process: subprocess.Popen[str]) -> Iterator[None]:
    """Inside, and until the process has ended, each line that it prints comes out here, redacted."""
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
                sink.write(redacted(line.removesuffix("\n")) + "\n" * line.endswith("\n"))
                sink.flush()
            except (OSError, ValueError):  # nobody reads any more: the process must not wait for room in the pipe
                continue
