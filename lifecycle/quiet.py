"""Keep libraries' output off the user's terminal: NeMo prints some thirty lines before it does anything."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def quietly(log: Path | None = None) -> Iterator[IO[str]]:
    """Inside, standard output and error of this process go to `log` (default: nowhere); yields the real stderr.

    File descriptors are switched, so that output of C++ code and of child processes goes there too.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    terminal = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace")
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
