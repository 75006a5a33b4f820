"""The process that ends a rank when it hangs: nvidia-resiliency-ext's, without that package's own launcher.

A recipe with `with=fault_tolerance` carries its FaultToleranceCallback, which sends heartbeats to this process and
learns from them how long is too long. `ft_launcher` would start it; here each rank, started by Slurm or torchrun, does.
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
LEARNED = "ft_state"
"""The folder in RUN where timeouts that were learned are kept for the attempts to come."""

CHECK_S = 1.0
_OURS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def prepare(callbacks: list[Any], run: Path) -> bool:
    """Whether one of these configs needs a rank monitor, whose learned timeouts are then kept in the run."""
    import fiddle as fdl

    monitored = [config for config in callbacks if getattr(fdl.get_callable(config), "__name__", "") == CALLBACK]
    for config in monitored:
        config.exp_dir = str(run / LEARNED)
    return bool(monitored)


def start(run: Path) -> int:
    """Start the monitor of this rank; its process id. It dies with this process (common/parent_death.py).

    Raises:
        ImportError: nvidia-resiliency-ext is not installed.
    """
    monitor, folder = _start(run)
    atexit.register(_end, monitor, folder)
    return int(monitor.pid)


@contextlib.contextmanager
def within(run: Path) -> Iterator[None]:
    """Inside, this rank has a monitor: for a fork, which runs no exit handlers. Raises what `start` raises."""
    monitor, folder = _start(run)
    try:
        yield
    finally:
        _end(monitor, folder)


def _start(run: Path) -> tuple[Any, str]:
    """The monitor, and the folder of its sockets."""
    from nvidia_resiliency_ext import fault_tolerance as ft
    from nvidia_resiliency_ext.fault_tolerance.data import FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR

    (run / LEARNED).mkdir(exist_ok=True)
    # What comes through these sockets is unpickled, so nobody else may open or make one: not in /tmp, by names that can
    # be guessed. The monitor, which is forked, puts one of its own into `tempfile.tempdir`.
    folder = tempfile.mkdtemp(prefix="superpod_rank_")
    socket, default, tempfile.tempdir = f"{folder}/rank.socket", tempfile.tempdir, folder
    config = ft.FaultToleranceConfig(workload_check_interval=CHECK_S, enable_nic_monitor=False)
    # A warning before the time limit, or Ctrl-C, reaches all processes: the monitor would end, and the rank's save
    # with it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)
    fork: Any = multiprocessing.get_context("fork")  # its annotation asks for a module; a context is what it uses
    try:
        monitor = ft.RankMonitorServer.run_in_subprocess(config, socket, is_restarter_logger=False, mp_ctx=fork)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        tempfile.tempdir = default
    os.environ[FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR] = socket
    return monitor, folder


def _end(monitor: Any, folder: str) -> None:
    monitor.kill()  # it ignores SIGTERM
    shutil.rmtree(folder, ignore_errors=True)
