"""Find the cuDNN version that a run on this machine loads, which determines Transformer Engine's attention kernels."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

from superpod.runtime.processes.command import output_of

NAME = "cudnn"
"""The name of cuDNN in the requirements of a run."""
DISTRIBUTIONS = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
"""Names of the pip packages, from which torch loads cuDNN if they are dependencies of torch."""
LIBRARY = "libcudnn.so.9"
_ASK = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).cudnnGetVersion())"


def version() -> str | None:
    """Return the version of cuDNN, such as 9.13.1; None if it is not found.

    The search order is that of Transformer Engine 2.9 (common/__init__.py:282-318): CUDNN_HOME or CUDNN_PATH, pip
    packages, system libraries.
    """
    home = os.environ.get("CUDNN_HOME") or os.environ.get("CUDNN_PATH")
    own_libraries = sorted(Path(home).glob(f"lib*/**/{LIBRARY}")) if home else []
    if own_libraries:
        return _query_library(str(own_libraries[0]))
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return _query_library(LIBRARY)


def format_version(number: int) -> str:
    """Convert cuDNN's version number to text: 91301 to 9.13.1; before 9.0, 8906 to 8.9.6."""
    major, rest = divmod(number, 10000) if number >= 90000 else divmod(number, 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _query_library(path: str) -> str | None:
    """Return the version of the library `path`, from a separate process: if it were loaded here, torch would use it."""
    number = output_of([sys.executable, "-c", _ASK, path], timeout_s=30)
    return format_version(int(number)) if number and number.isdigit() else None
