"""A recorded profile, independent of the tool: work items with their times, and step markers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Nanoseconds = NDArray[np.int64]

GROUPS = ("", "tp", "cp", "ep", "dp", "pp")
HOST_NS = 50_000
"""Minimum duration of host activities that are kept, in ns."""


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
    """index into `Recording.names`"""
    kind: NDArray[np.int8]
    """index into `profile_classes.CLASSES`"""
    group: NDArray[np.int8]
    """for communication: index into GROUPS"""
    launched: Nanoseconds
    """when the host launched it; -1 = unknown"""
    sms: NDArray[np.float32]
    """share of the SMs that its thread blocks can fill, 0 to 1; NaN = unknown"""

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class Host:
    """Host activities of at least HOST_NS, which show what the GPU waited for."""

    start: Nanoseconds
    end: Nanoseconds
    name: NDArray[np.int32]


@dataclass(frozen=True)
class Recording:
    """The content of a profile, as read by `profile_torch` or `profile_nsys`."""

    tool: str
    """`torch` or `nsys`"""
    device: str
    """name of the GPU, such as `NVIDIA H100 80GB HBM3`; `CPU` if no kernel was recorded"""
    on_gpu: bool
    names: list[str]
    work: Work
    host: Host
    begin: int
    """start of the first step, ns"""
    end: int
    """end of the last step, ns"""
    steps: int
    """number of steps between `begin` and `end`; 0 = unknown"""
    marks: str
    """what marks the steps"""
    rank: int | None = None
    gpus: tuple[int, ...] = ()
    """all GPUs in the file"""
    counters: dict[str, float] = field(default_factory=dict)
    """hardware metric -> its mean over the steps, %"""
    notes: tuple[str, ...] = ()
