"""Start the monitor process of nvidia-resiliency-ext, which kills a rank that hangs.

With `with=fault_tolerance`, a recipe has the package's FaultToleranceCallback, which sends heartbeats to the monitor
and learns timeouts from them. The package's `ft_launcher` is not used: each rank starts its monitor, under Slurm or
torchrun.
"""

import atexit
import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CALLBACK = "FaultToleranceCallback"
LEARNED_TIMEOUTS = "ft_state"
"""Folder in the run folder with the learned timeouts, for later attempts."""

CHECK_S = 1.0
_HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def prepare(callbacks: list[Any], run: Path) -> bool:
    """Make each FaultToleranceCallback store its timeouts in `run`; return whether there is one."""
    import fiddle as fdl

    monitor_configs = [config for config in callbacks if getattr(fdl.get_callable(config), "__name__", "") == CALLBACK]
    for config in monitor_configs:
        config.exp_dir = str(run / LEARNED_TIMEOUTS)
    return bool(monitor_configs)


def start(run: Path) -> int:
    """Start the monitor of this rank and return its pid. It is killed with this process (common/parent_death.py).

    Raises ImportError if nvidia-resiliency-ext is not installed.
    """
    monitor, folder = _start(run)
    atexit.register(_end, monitor, folder)
    return int(monitor.pid)


@contextlib.contextmanager
def run_monitor(run: Path) -> Iterator[None]:
    """Run a monitor within the block, for a forked rank, which runs no exit handlers. Raises ImportError."""
    monitor, folder = _start(run)
    try:
        yield
    finally:
        _end(monitor, folder)


def _start(run: Path) -> tuple[Any, str]:
    """Start the monitor process; return it and the folder of its sockets."""
    from nvidia_resiliency_ext import fault_tolerance as ft
    from nvidia_resiliency_ext.fault_tolerance.data import FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR

    (run / LEARNED_TIMEOUTS).mkdir(exist_ok=True)
    # The monitor unpickles data from its sockets, so no other user may open or create one: they must not have
    # predictable names in /tmp. The forked monitor creates another socket in `tempfile.tempdir`.
    folder = tempfile.mkdtemp(prefix="superpod_rank_")
    socket, default, tempfile.tempdir = f"{folder}/rank.socket", tempfile.tempdir, folder
    config = ft.FaultToleranceConfig(workload_check_interval=CHECK_S, enable_nic_monitor=False)
    # Ctrl-C and the signal before the time limit reach all processes. They would end the monitor, and then the rank
    # during its save.
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
    fork: Any = multiprocessing.get_context("fork")  # the parameter is annotated as a module, but a context is used
    try:
        monitor = ft.RankMonitorServer.run_in_subprocess(config, socket, is_restarter_logger=False, mp_ctx=fork)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        tempfile.tempdir = default
    os.environ[FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR] = socket
    return monitor, folder


def _end(monitor: Any, folder: str) -> None:
    monitor.kill()  # it ignores SIGTERM
    shutil.rmtree(folder, ignore_errors=True)
