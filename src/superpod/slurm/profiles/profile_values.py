"""Types and parsers of the values in a cluster profile."""

from __future__ import annotations

import re
from typing import Literal

GpuForm = Literal["gpus-per-node", "gres", "none"]
Mpi = Literal["none", "pmi2", "pmix", "cray_shasta"]
CpuBind = Literal["gpu", "slurm"]
Topology = Literal["", "block"]
Mail = Literal["NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "TIME_LIMIT", "TIME_LIMIT_80"]
"""Slurm's --mail-type (sbatch(1))."""
Event = Literal["end", "stop", "stall"]
"""Events of a run about which the webhook receives a message (runtime/attempts/notify.py)."""
Network = Literal["infiniband", "roce", "ethernet", "none"]
CHECKS = ("gpus", "nvlink", "infiniband", "clocks", "disk", "time", "bandwidth")
"""Built-in node checks; checks/NAME.sh of a user's collection adds the check NAME."""

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def seconds(time: str) -> int:
    """Return a time in one of Slurm's formats (M, M:S, H:M:S, D-H, D-H:M, D-H:M:S) in seconds.

    Raises:
        ValueError: the format is invalid.
    """
    match = _TIME.fullmatch(time)
    if match is None:
        raise ValueError(f"not a time in Slurm's format: {time!r}")
    days, *rest = match.groups()
    numbers = [int(part) for part in rest if part is not None]
    if days is not None:  # H[:M[:S]]
        hours, minutes, secs = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:  # H:M:S
        hours, minutes, secs = numbers
    else:  # M[:S]
        hours = 0
        minutes, secs = [*numbers, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs


def one_line(value: str) -> str:
    """Return a value for one line of a job file unchanged, after checking it.

    Raises:
        ValueError: the value contains a line break, a control character or a secret.
    """
    from superpod.common.redaction import redact_text

    if any(not c.isprintable() and c != "\t" for c in value):
        raise ValueError("must be printable and on one line")
    if redact_text(value) != value:
        raise ValueError("must not contain a secret, because job files are readable; export it before `recipes submit`")
    return value
