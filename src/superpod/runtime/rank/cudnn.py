"""Which cuDNN a run on this machine will load: its version decides which attention Transformer Engine takes."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

from superpod.runtime.processes.command import output_of

NAME = "cudnn"
"""As a run's needs call it."""
DISTRIBUTIONS = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
"""Of pip; torch loads it from there where it is one of its dependencies."""
LIBRARY = "libcudnn.so.9"
_ASK = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).cudnnGetVersion())"


def version() -> str | None:
    """Such as 9.13.1; None where none is found.

    Looks where Transformer Engine 2.9 does (common/__init__.py:282-318): CUDNN_HOME or CUDNN_PATH, pip's, the system's.
    """
    home = os.environ.get("CUDNN_HOME") or os.environ.get("CUDNN_PATH")
    own = sorted(Path(home).glob(f"lib*/**/{LIBRARY}")) if home else []
    if own:
        return _of_library(str(own[0]))
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return _of_library(LIBRARY)


def text_of(number: int) -> str:
    """91301 is 9.13.1; before 9.0, 8906 was 8.9.6."""
    major, rest = divmod(number, 10000) if number >= 90000 else divmod(number, 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _of_library(path: str) -> str | None:
    """What the library itself says, in a process of its own: a library loaded here would stand before torch's own."""
    number = output_of([sys.executable, "-c", _ASK, path], timeout_s=30)
    return text_of(int(number)) if number and number.isdigit() else None
