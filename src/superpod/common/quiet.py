"""Keep libraries' output off the user's terminal: NeMo prints some thirty lines before it does anything."""

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
    """The user's terminal or pipe. Once closed, it takes what is written: ranks are still to be stopped."""

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())


@contextmanager
def quietly(log: Path | None = None) -> Iterator[IO[str]]:
    """Inside, standard output and error of this process go to `log` (default: nowhere); yields the real stderr.

    File descriptors are switched, so that output of C++ code and of child processes goes there too.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    terminal = _Terminal(open(os.dup(2), "wb"), encoding=sys.stderr.encoding or "utf-8", errors="replace")  # noqa: SIM115
    # Two handles on the real stderr: `terminal` for the caller, `kept` to restore.
    with log.open("ab") if log else tempfile.TemporaryFile() as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        try:
            yield terminal
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, saved in zip((1, 2), kept, strict=True):
                os.dup2(saved, number)
                os.close(saved)
            terminal.close()
