"""Redirect the output of a rank to the log of its node, which srun writes, or without srun to a log of its own."""

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
"""Environment variable that is set if srun writes the output of a node's ranks to one file, with labels."""

DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Environment variables (new and old name) with the prefix of flight-recorder dumps; PyTorch appends the rank."""

ASK = signal.SIGUSR2
"""The signal that makes a rank write the Python stacks of its threads to its log: see `stacks.py`."""


def register() -> None:
    """Install a signal handler for ASK that writes the stacks of this process to stderr, in C and without locks."""
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
        faulthandler.register(ASK, file=2, all_threads=True, chain=False)


def log_path(attempt_dir: Path) -> Path:
    """Return the log of this rank, `attempts/NNN/logs/{node}.{rank}.log`, from the variables of torchrun or Slurm."""
    return attempt_dir / "logs" / f"{_node()}.{os.environ.get('RANK', '0')}.log"


def _node() -> str:
    """Return the index of this node in the job, from the variables of torchrun or Slurm; "0" without them."""
    return os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or "0"


def capture_output(attempt_dir: str | Path) -> Path | None:
    """Redirect stdout and stderr of this rank and its children to its log file; return the file.

    None if srun writes the output, or if nothing is redirected: outside a rank (no RANK in the environment), if the
    output is already captured, or if the attempt folder does not exist. Raises OSError if the log cannot be opened.
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
    """Flush stdout and stderr after each line, since a killed rank loses the rest of its buffer."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _redirect_children(log: Path) -> None:
    """Make data workers and checkpoint writers write to the node's log directly, without labels. Raises OSError.

    slurmstepd considers a task running while its pipes are open. A child of a killed rank would keep them open, and
    srun would report the death up to 60 s late. This applies to all children of multiprocessing, including its resource
    tracker. Programs started by subprocess keep the pipes and the labels.
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
    """Return the variables that make PyTorch's flight recorder write to the attempt's logs; {} if one is set already.

    By default, it writes to /tmp or the home folder of the container, which are deleted with the container.
    """
    if any(name in environ for name in DUMPS):
        return {}
    return dict.fromkeys(DUMPS, str(attempt_dir / "logs" / "nccl_trace_rank_"))


def log_by_node(command: list[str], attempt_dir: Path) -> tuple[list[str], dict[str, str]]:
    """Add the options for one log per node to an srun command; return the command and variables for the ranks.

    slurmstepd then writes `attempts/NNN/logs/{node}.log` on the node itself, with the rank before each line. It
    survives a killed rank, whose last output is logged too. Other commands are returned unchanged, and each rank
    redirects its output to a log of its own.
    """
    if Path(command[0]).name != "srun":
        return command, {}
    path = str(attempt_dir / "logs").replace("%", "%%")  # srun expands %n to the index of the node in the job
    options = ["--label", f"--output={path}/%n.log", "--open-mode=append"]
    return [command[0], *options, *command[1:]], {BY_NODE: "1"}
