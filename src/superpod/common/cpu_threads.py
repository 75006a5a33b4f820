"""OpenMP threads of processes that compute on CPUs: rehearsals, runs without a GPU, conversions.

By default each process starts one thread per core, and waiting threads spin. Several ranks, or one on a busy machine,
then spend most of their time spinning: a step of 0.2 s takes 5 to 24 s. Standard library only.
"""

from __future__ import annotations

import os
from pathlib import Path

THREADS, POLICY = "OMP_NUM_THREADS", "OMP_WAIT_POLICY"
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota: Path = _QUOTA) -> int:
    """Cores that this process may use, by its CPU affinity and its container's CPU quota."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        limit, period = quota.read_text().split()
        return max(1, min(bound, int(limit) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or "max": no quota
        return bound


def threads_per_rank(ranks: int) -> int:
    """Threads per rank: the user's OMP_NUM_THREADS, else an equal share of the usable cores."""
    own = os.environ.get(THREADS, "")
    if own.isdecimal() and int(own):
        return int(own)
    return max(1, usable_cores() // ranks)


def environment(ranks: int) -> dict[str, str]:
    """OpenMP's environment variables for each of `ranks` processes on this machine."""
    return {THREADS: str(threads_per_rank(ranks)), POLICY: os.environ.get(POLICY, "PASSIVE")}


def wait_passively() -> None:
    """Let waiting threads of this process and its children sleep. OpenMP reads this when torch is imported."""
    os.environ.setdefault(POLICY, "PASSIVE")
