"""A recorded profile, independent of the tool: work items with their times, and step markers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Nanoseconds = NDArray[np.int64]

GROUPS = ("", "tp", "cp", "ep", "dp", "pp")
"""Kinds of parallelism of a process group; "" = unknown, or no communication."""
HOST_NS = 50_000
"""Minimum duration of host activities that are kept, in nanoseconds."""


@dataclass
class Names:
    """Maps names to indices, so that a million work items store each name once."""

    texts: list[str] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)

    def number(self, text: str) -> int:
        """Return the index of a name, which is added if it is new."""
        number = self._numbers.setdefault(text, len(self.texts))
        if number == len(self.texts):
            self.texts.append(text)
        return number


@dataclass(frozen=True)
class Work:
    """Work items of one GPU, or of all threads of a process on CPUs, as arrays of equal length."""

    start: Nanoseconds
    end: Nanoseconds
    name: NDArray[np.int32]
    """Index into `Recording.names`."""
    kind: NDArray[np.int8]
    """Index into `profile_classes.CLASSES`."""
    group: NDArray[np.int8]
    """For communication: index into `GROUPS`."""
    launched: Nanoseconds
    """Time at which the host launched it; -1 = unknown."""
    sms: NDArray[np.float32]
    """Share of the SMs that its thread blocks can fill, 0 to 1; NaN = unknown."""

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class Host:
    """Activities of the host that took at least `HOST_NS`, as arrays of equal length."""

    start: Nanoseconds
    end: Nanoseconds
    name: NDArray[np.int32]
    """Index into `Recording.names`."""


@dataclass(frozen=True)
class Recording:
    """The content of a profile, as read by `profile_torch` or `profile_nsys`."""

    tool: str
    """`torch` or `nsys`."""
    device: str
    """Name of the GPU, such as `NVIDIA H100 80GB HBM3`; `CPU` if no kernel was recorded."""
    on_gpu: bool
    names: list[str]
    work: Work
    host: Host
    begin: int
    """Start of the first step in nanoseconds."""
    end: int
    """End of the last step in nanoseconds."""
    steps: int
    """Number of steps between `begin` and `end`; 0 = unknown."""
    marks: str
    """Description of the step markers; "" if there are none."""
    rank: int | None = None
    gpus: tuple[int, ...] = ()
    """Numbers of all GPUs in the file."""
    counters: dict[str, float] = field(default_factory=dict)
    """{hardware metric: mean over the steps in %}."""
    notes: tuple[str, ...] = ()
    """Notes for the user, for example about omitted events."""
