"""A recorded profile, whichever tool made it: pieces of work with their times, and the marks of steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]
"""Nanoseconds."""


@dataclass
class Names:
    """Names as numbers, so that a million pieces of work hold a name once."""

    texts: list[str] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)

    def number(self, text: str) -> int:
        """The number of a name, which is new or known."""
        number = self._numbers.setdefault(text, len(self.texts))
        if number == len(self.texts):
            self.texts.append(text)
        return number


@dataclass(frozen=True)
class Work:
    """Pieces of work of one GPU, or of all threads of a process on CPUs; arrays of one length."""

    start: Times
    end: Times
    name: NDArray[np.int32]
    """into `Recording.names`"""
    kind: NDArray[np.int8]
    """into `profile_classes.CLASSES`"""
    group: NDArray[np.int8]
    """of communication: into GROUPS"""
    launched: Times
    """when the host called for it; -1 = unknown"""
    sms: NDArray[np.float32]
    """share of the SMs that its blocks can fill, 0 to 1; NaN = unknown"""

    def __len__(self) -> int:
        return len(self.start)


GROUPS = ("", "tp", "cp", "ep", "dp", "pp")


@dataclass(frozen=True)
class Host:
    """What the host did for 50 us or more, to name what the GPU waited for."""

    start: Times
    end: Times
    name: NDArray[np.int32]


@dataclass(frozen=True)
class Recording:
    """What `profile_torch` and `profile_nsys` read from a file."""

    tool: str
    """torch or nsys"""
    device: str
    """as it is called: `NVIDIA H100 80GB HBM3`; CPU where no kernel was recorded"""
    on_gpu: bool
    names: list[str]
    work: Work
    host: Host
    begin: int
    end: int
    """of the steps, ns"""
    steps: int
    """between `begin` and `end`; 0 = unknown"""
    marks: str
    """what says where steps begin and end"""
    rank: int | None = None
    gpus: tuple[int, ...] = ()
    """that the file has; this one is the first"""
    counters: dict[str, float] = field(default_factory=dict)
    """metric of the hardware -> its mean over the steps, %"""
    notes: tuple[str, ...] = ()


HOST_NS = 50_000
