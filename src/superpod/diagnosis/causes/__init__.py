"""The known causes of failures, in one file per subject. Standard library only, Python 3.9.

The patterns match messages from the sources of the libraries (PyTorch, NCCL, Megatron-Core, NeMo, Lightning, Slurm,
pyxis, the kernel, the driver) and from public issue threads, which are cited in tests/diagnosis/why_corpus.
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
    Pattern,
    find_by_topic,
)

__all__ = [
    "ALL",
    "CAUSES_BY_NAME",
    "CAUSES_WITH_TOPICS",
    "CERTAIN",
    "CONFIDENCE",
    "ECHO",
    "ENDING",
    "GROUND",
    "HINT",
    "LIKELY",
    "MACHINE_CAUSES",
    "PROGRAM",
    "TABLES",
    "Cause",
    "Pattern",
    "find_by_topic",
]

TABLES = (memory, network, hardware, numbers, layouts, disks, checkpoints, cluster, software)

ALL: tuple[Cause, ...] = tuple(cause for table in TABLES for cause in table.CAUSES)
CAUSES_WITH_TOPICS = tuple(cause for cause in ALL if cause.topics or cause.message_topics or cause.fallback)
MACHINE_CAUSES = {
    cause.name
    for cause in ALL
    if cause.depth != PROGRAM or any(cause in table.CAUSES for table in (memory, network, disks))
}
"""Names of causes that an allocator, the operating system, NCCL or Slurm reports."""
CAUSES_BY_NAME = {cause.name: cause for cause in ALL}
