"""Redirect the output of a rank: to one file per node, which srun writes, or without srun to one file per rank."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing import util
from pathlib import Path
from typing import Any

_CAPTURED = "SUPERPOD_CAPTURED"

BY_NODE = "SUPERPOD_LOGS_BY_NODE"
"""Environment variable that is set if srun writes the output of all ranks of a node to one file, with labels."""

DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Environment variables (new and old name) with the path of flight-recorder dumps, to which PyTorch appends the
rank.
"""

ASK = signal.SIGUSR2
"""The signal that makes a rank write the Python stacks of its threads to its log: see `stacks.py`."""


def register() -> None:
    """Install a C signal handler for ASK, which needs no lock and writes the stacks of this process to stderr."""
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
        faulthandler.register(ASK, file=2, all_threads=True, chain=False)


def log_path(attempt_dir: Path) -> Path:
    """Return `attempts/NNN/logs/{node}.{rank}.log` for this process, based on the variables of torchrun or Slurm."""
    return attempt_dir / "logs" / f"{_node()}.{os.environ.get('RANK', '0')}.log"


def _node() -> str:
    return os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or "0"


def capture_output(attempt_dir: str | Path) -> Path | None:
    """Redirect stdout and stderr of this rank and its children to its log file; return the file.

    Return None if srun writes the output, or if there is nothing to do: outside a rank (no RANK in the environment), if
    the output is already captured, or if the attempt folder does not exist. Raises OSError if the log cannot be opened.
    """
    attempt_dir = Path(attempt_dir)
    if "RANK" not in os.environ or _CAPTURED in os.environ or not attempt_dir.is_dir():
        return None
    if BY_NODE in os.environ:
        os.environ[_CAPTURED] = BY_NODE
        _enable_line_buffering()
        register()
        _redirect_children(attempt_dir / "logs" / f"{_node()}.log")
        return None
    path = log_path(attempt_dir)
    path.parent.mkdir(exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    # Redirect descriptors 1 and 2, not sys.stdout, since NCCL and other C++ code print too.
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    os.environ[_CAPTURED] = str(path)
    _enable_line_buffering()
    register()
    return path


def _enable_line_buffering() -> None:
    """Flush each line: a killed rank would lose buffered blocks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _redirect_children(log: Path) -> None:
    """Make data workers and checkpoint writers write to the node's file directly, without labels. Raises OSError.

    slurmstepd considers a task running while its pipes are open. A child of a killed rank would keep them open, and
    srun would report the death up to 60 s late. This applies to all children of multiprocessing, including its resource
    tracker; programs started by subprocess keep the pipes and the labels.
    """
    # Never closed, since grandchildren need it too.
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    pipes = {standard: os.dup(standard) for standard in (1, 2)}

    def redirect() -> list[int]:
        own_pipes = [standard for standard, pipe in pipes.items() if os.path.sameopenfile(standard, pipe)]
        for standard in own_pipes:  # leave descriptors that are redirected elsewhere
            os.dup2(file, standard)
        return own_pipes

    def in_child() -> None:
        redirect()
        for pipe in pipes.values():
            # Not inherited, so that programs started by subprocess do not keep the pipe of the node's log open.
            os.dup2(file, pipe, inheritable=False)

    os.register_at_fork(after_in_child=in_child)
    spawn = util.spawnv_passfds  # starts spawned children, the fork server and the resource tracker

    def spawn_redirected(*launch: Any) -> int:
        own_pipes = redirect()
        try:
            return spawn(*launch)
        finally:
            for standard in own_pipes:
                os.dup2(pipes[standard], standard)

    util.spawnv_passfds = spawn_redirected


def flight_recorder(attempt_dir: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make PyTorch's flight recorder write to the attempt; {} if the user has set one of them.

    By default, it writes to /tmp or the home folder of the container, which is deleted with the container.
    """
    if any(name in environ for name in DUMPS):
        return {}
    return dict.fromkeys(DUMPS, str(attempt_dir / "logs" / "nccl_trace_rank_"))


def log_by_node(command: list[str], attempt_dir: Path) -> tuple[list[str], dict[str, str]]:
    """Add options for one log file per node to an srun command; return the command, and variables for the ranks.

    slurmstepd then writes `attempts/NNN/logs/{node}.log` on the node itself, with the rank before each line. It
    survives a killed rank, whose last output is logged too. Other commands are returned unchanged, and each rank then
    has its own log.
    """
    if Path(command[0]).name != "srun":
        return command, {}
    path = str(attempt_dir / "logs").replace("%", "%%")  # srun expands %n to the index of the node in the job
    options = ["--label", f"--output={path}/%n.log", "--open-mode=append"]
    return [command[0], *options, *command[1:]], {BY_NODE: "1"}
