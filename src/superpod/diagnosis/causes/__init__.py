"""The known causes of failures, one file per subject. Standard library only, Python 3.9.

The signs are messages from the sources of the libraries (PyTorch, NCCL, Megatron-Core, NeMo, Lightning, Slurm, pyxis,
the kernel, the driver) and from public issue threads, which tests/diagnosis/why_corpus cites.
"""

from __future__ import annotations

from superpod.diagnosis.causes import (
    checkpoints,
    cluster,
    disks,
    hardware,
    layouts,
    memory,
    network,
    numbers,
    software,
)
from superpod.diagnosis.causes.table import (
    CERTAIN,
    CONFIDENCE,
    ECHO,
    ENDING,
    GROUND,
    HINT,
    LIKELY,
    PROGRAM,
    Cause,
    Sign,
    find_by_topic,
)

__all__ = [
    "ALL",
    "BY_NAME",
    "CERTAIN",
    "CONFIDENCE",
    "ECHO",
    "ENDING",
    "GROUND",
    "HINT",
    "LIKELY",
    "OF_MACHINE",
    "PROGRAM",
    "TABLES",
    "WITH_TOPIC",
    "Cause",
    "Sign",
    "find_by_topic",
]

TABLES = (memory, network, hardware, numbers, layouts, disks, checkpoints, cluster, software)

ALL: tuple[Cause, ...] = tuple(cause for table in TABLES for cause in table.CAUSES)
WITH_TOPIC = tuple(cause for cause in ALL if cause.about or cause.speaks or cause.otherwise)
OF_MACHINE = {
    cause.name
    for cause in ALL
    if cause.depth != PROGRAM or any(cause in table.CAUSES for table in (memory, network, disks))
}
"""Names of causes that an allocator, the operating system, NCCL or Slurm reports."""
BY_NAME = {cause.name: cause for cause in ALL}
