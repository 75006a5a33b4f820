"""Where the output of a rank goes: into a file a node that srun writes, or one of its own where nobody keeps it."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

_CAPTURED = "SUPERPOD_CAPTURED"

BY_NODE = "SUPERPOD_LOGS_BY_NODE"
"""Set where srun writes the output of all ranks of a node into one file, with the rank before each line."""


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
    if BY_NODE in os.environ:
        os.environ[_CAPTURED] = BY_NODE
        _write_lines()
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
    _write_lines()
    return path


def _write_lines() -> None:
    """To a file or a pipe, Python would buffer blocks: a killed rank loses them."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def by_node(command: list[str], attempt_dir: Path) -> tuple[list[str], dict[str, str]]:
    """A command that starts the ranks, with a file a node for their output, and what tells the ranks so.

    srun's own slurmstepd writes `attempts/NNN/logs/{node}.log` on the node itself, with the rank before each line, and
    outlives a rank that is killed: its last words are there too. Any other command leaves the ranks logs of their own.
    """
    if Path(command[0]).name != "srun":
        return command, {}
    path = str(attempt_dir / "logs").replace("%", "%%")  # srun expands %n to the node's number in the job
    options = ["--label", f"--output={path}/%n.log", "--open-mode=append"]
    return [command[0], *options, *command[1:]], {BY_NODE: "1"}
