"""Keep the output of libraries away from the terminal: NeMo prints about thirty lines when it is imported."""

from __future__ import annotations

import errno
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


class _Terminal(io.TextIOWrapper):
    """The user's terminal or pipe. If it is closed, output is discarded, so that ranks can still be stopped."""

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())


@contextmanager
def silence_libraries(log: Path | None = None) -> Iterator[IO[str]]:
    """Redirect stdout and stderr of this process to `log` (None = discard them), and yield the real stderr.

    The file descriptors are redirected, which also covers the output of C++ code and child processes.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved_streams = os.dup(1), os.dup(2)
    terminal = _Terminal(open(os.dup(2), "wb"), encoding=sys.stderr.encoding or "utf-8", errors="replace")  # noqa: SIM115
    with log.open("ab") if log else tempfile.TemporaryFile() as sink:
        # Replace the descriptors, not sys.stdout: compiled libraries and child processes write to them directly.
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        try:
            yield terminal
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, saved in zip((1, 2), saved_streams, strict=True):
                os.dup2(saved, number)
                os.close(saved)
            terminal.close()
