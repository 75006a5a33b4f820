"""Set the number and wait policy of OpenMP threads, for rehearsals, runs without a GPU, and conversions on CPUs.

By default, each process starts one thread per core, and waiting threads spin. If several ranks or other programs share
the cores, they spend most of the time spinning: a step of 0.2 s takes 5 to 24 s. Standard library only.
"""

from __future__ import annotations

import os
from pathlib import Path

THREADS, POLICY = "OMP_NUM_THREADS", "OMP_WAIT_POLICY"
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota: Path = _QUOTA) -> int:
    """Return the number of cores that the CPU affinity and the container's CPU quota (file `quota`) permit."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        limit, period = quota.read_text().split()
        return max(1, min(bound, int(limit) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or "max": no quota
        return bound


def threads_per_rank(ranks: int) -> int:
    """Return the number of threads per rank: OMP_NUM_THREADS if set, or else an equal share of the usable cores."""
    requested_threads = os.environ.get(THREADS, "")
    if requested_threads.isdecimal() and int(requested_threads):
        return int(requested_threads)
    return max(1, usable_cores() // ranks)


def environment(ranks: int) -> dict[str, str]:
    """Return the OpenMP environment variables for each of `ranks` processes on this machine."""
    return {THREADS: str(threads_per_rank(ranks)), POLICY: os.environ.get(POLICY, "PASSIVE")}


def set_passive_waiting() -> None:
    """Make waiting OpenMP threads of this process and its children sleep. Must be called before torch is imported."""
    os.environ.setdefault(POLICY, "PASSIVE")
