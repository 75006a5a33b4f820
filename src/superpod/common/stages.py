"""What a long call is doing, from the process that does it to the one that shows it: a line in a small file.

The file's name travels in the environment, so that a fork and a fresh process both have it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

VARIABLE = "SUPERPOD_STAGE_FILE"


def note(text: str) -> None:
    """Say what this process does now, where somebody watches it."""
    if name := os.environ.get(VARIABLE):
        with contextlib.suppress(OSError):
            Path(name).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def watched() -> Iterator[Callable[[], str]]:
    """A function that returns the newest note of this process and those that it starts; '' before the first."""
    before = os.environ.get(VARIABLE)
    with tempfile.TemporaryDirectory(prefix="recipes-stage-") as folder:
        path = Path(folder, "stage")
        os.environ[VARIABLE] = str(path)

        def newest() -> str:
            try:
                return path.read_text(encoding="utf-8")
            except OSError:
                return ""

        try:
            yield newest
        finally:
            os.environ.pop(VARIABLE, None)
            if before is not None:
                os.environ[VARIABLE] = before
