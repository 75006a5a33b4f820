"""A log file for each rank, written from the earliest moment of its process."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

_CAPTURED = "SUPERPOD_CAPTURED"


def log_path(attempt_dir: Path) -> Path:
    """`attempts/NNN/logs/{node}.{rank}.log` of this process, from torchrun's variables or Slurm's."""
    node = os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or "0"
    return attempt_dir / "logs" / f"{node}.{os.environ.get('RANK', '0')}.log"


def capture_output(attempt_dir: str | Path) -> Path | None:
    """Send stdout and stderr of this rank, and of the processes it starts, to its log file.

    Does nothing and returns None outside a rank (no RANK in the environment), where the output is already captured,
    and where the attempt folder does not exist. Raises OSError when the log cannot be opened.
    """
    attempt_dir = Path(attempt_dir)
    if "RANK" not in os.environ or _CAPTURED in os.environ or not attempt_dir.is_dir():
        return None
    path = log_path(attempt_dir)
    path.parent.mkdir(exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    # Descriptors 1 and 2, not sys.stdout: NCCL and other C++ code print too.
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    os.environ[_CAPTURED] = str(path)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # to a file, Python would buffer blocks: a killed rank loses them
            stream.reconfigure(line_buffering=True)
    return path
