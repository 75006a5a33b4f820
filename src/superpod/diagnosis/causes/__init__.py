"""Why runs fail: the table of causes, a file per subject. Standard library only, Python 3.9.

The signs are the words of the libraries' own sources (PyTorch, NCCL, Megatron-Core, NeMo, Lightning, Slurm, pyxis, the
kernel, the driver) and of public issue threads; tests/diagnosis/why_corpus cites those.
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
    topic,
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
    "topic",
]

TABLES = (memory, network, hardware, numbers, layouts, disks, checkpoints, cluster, software)

ALL: tuple[Cause, ...] = tuple(cause for table in TABLES for cause in table.CAUSES)
WITH_TOPIC = tuple(cause for cause in ALL if cause.about or cause.speaks or cause.otherwise)
OF_MACHINE = {
    cause.name
    for cause in ALL
    if cause.depth != PROGRAM or any(cause in table.CAUSES for table in (memory, network, disks))
}
"""Causes that an allocator, the operating system, NCCL or Slurm reports."""
BY_NAME = {cause.name: cause for cause in ALL}
