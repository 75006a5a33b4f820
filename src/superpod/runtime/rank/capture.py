"""Where the output of a rank goes: into a file a node that srun writes, or one of its own where nobody keeps it."""

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
"""Set where srun writes the output of all ranks of a node into one file, with the rank before each line."""


DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""The first part of the path of a flight-recorder dump, to which PyTorch adds the rank; by its newer and older name."""

ASK = signal.SIGUSR2
"""At this signal a rank writes the Python stacks of its threads into its log: see `stacks.py`."""


def register() -> None:
    """Let this process write its stacks to its standard error at ASK, from a handler in C that needs no lock."""
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
        faulthandler.register(ASK, file=2, all_threads=True, chain=False)


def log_path(attempt_dir: Path) -> Path:
    """`attempts/NNN/logs/{node}.{rank}.log` of this process, from torchrun's variables or Slurm's."""
    return attempt_dir / "logs" / f"{_node()}.{os.environ.get('RANK', '0')}.log"


def _node() -> str:
    return os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or "0"


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
        register()
        _keep_children_off_the_pipes(attempt_dir / "logs" / f"{_node()}.log")
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
    register()
    return path


def _write_lines() -> None:
    """To a file or a pipe, Python would buffer blocks: a killed rank loses them."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _keep_children_off_the_pipes(log: Path) -> None:
    """Have data workers and checkpoint writers write into the node's file themselves, without a label.

    slurmstepd calls a task ended once its pipes are: a child that outlives a killed rank would hold them, and srun hear
    of the death up to 60 s late. What multiprocessing forks or spawns is kept off, its resource tracker too; a program
    that subprocess starts keeps what it is given, its label as well.
    """
    # Never closed: children of children need it too. Raises OSError.
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    pipes = {standard: os.dup(standard) for standard in (1, 2)}

    def redirect() -> list[int]:
        ours = [standard for standard, pipe in pipes.items() if os.path.sameopenfile(standard, pipe)]
        for standard in ours:  # not what somebody has sent elsewhere
            os.dup2(file, standard)
        return ours

    def in_child() -> None:
        redirect()
        for pipe in pipes.values():
            os.dup2(file, pipe, inheritable=False)

    os.register_at_fork(after_in_child=in_child)
    spawn = util.spawnv_passfds  # the one door of spawned children, the fork server and the resource tracker

    def spawn_off(*launch: Any) -> int:
        ours = redirect()
        try:
            return spawn(*launch)
        finally:
            for standard in ours:
                os.dup2(pipes[standard], standard)

    util.spawnv_passfds = spawn_off


def flight_recorder(attempt_dir: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that let PyTorch's flight recorder write into the attempt; {} where the user has set one of them.

    By default it writes to /tmp or the home folder of the container, which is gone when that ends.
    """
    if any(name in environ for name in DUMPS):
        return {}
    return dict.fromkeys(DUMPS, str(attempt_dir / "logs" / "nccl_trace_rank_"))


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
