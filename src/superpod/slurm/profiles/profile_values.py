"""The values that keys of a cluster profile take, where they are not plain numbers and text."""

from __future__ import annotations

import re
from typing import Literal

from superpod.planner import hardware

GpuForm = Literal["gpus-per-node", "gres", "none"]
Mpi = Literal["none", "pmi2", "pmix", "cray_shasta"]
CpuBind = Literal["gpu", "slurm"]
Topology = Literal["", "block"]
Mail = Literal["NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "TIME_LIMIT", "TIME_LIMIT_80"]
"""Slurm's --mail-type (sbatch(1))."""
Event = Literal["end", "stop", "stall"]
"""Of a run: runtime/attempts/notify.py."""
Network = Literal["infiniband", "roce", "ethernet", "none"]
CHECKS = ("gpus", "nvlink", "infiniband", "clocks", "disk", "time", "bandwidth")
"""Checks of nodes that are built in; a collection's checks/NAME.sh adds NAME."""

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def seconds(time: str) -> int:
    """Seconds of Slurm's time format: minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S. Raises ValueError."""
    match = _TIME.fullmatch(time)
    if match is None:
        raise ValueError(f"not a time limit of Slurm: {time!r}")
    days, *rest = match.groups()
    # With days, the numbers are H[:M[:S]]; without, one number is minutes, two are M:S, three are H:M:S.
    numbers = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, secs = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, secs = numbers
    else:
        hours, (minutes, secs) = 0, [*numbers, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs


def one_line(value: str) -> str:
    """`value`, which goes into a line of its own somewhere.

    Raises:
        ValueError: it has a line break or a control, or holds a secret, which job files would show.
    """
    from superpod.common.redaction import redact_text

    if any(not c.isprintable() and c != "\t" for c in value):
        raise ValueError("must be printable and on one line")
    if redact_text(value) != value:
        raise ValueError("would write a secret into job files; export it where you call `recipes submit`")
    return value


def match_gpu(text: str) -> str:
    """The planner's name of a GPU that others call `text`: `nvidia_h100_80gb_hbm3` or `NVIDIA H100 80GB HBM3` is h100.

    "" where the planner knows none of that name: a site may call its GPUs as it likes.
    """
    facts = hardware.builtin()
    if (name := facts.gpu_name(text)) in facts.gpus:
        return name
    words = set(re.split(r"[^a-z0-9]+", text.lower()))
    # a100_40gb is meant only where both of its words are there.
    matches = [name for name in facts.gpus if set(name.split("_")) <= words]
    return max(matches, key=len, default="")
