"""Parse PyTorch's out-of-memory messages for the sizes in them. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"B": 1.0, "BYTES": 1.0, "KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30, "TIB": 2.0**40}
_UNITS |= {"KB": 2.0**10, "MB": 2.0**20, "GB": 2.0**30}
_SIZE = r"([\d.]+) (bytes|[KMGT]i?B|B)"
_FIELDS = {
    "tried": rf"Tried to allocate {_SIZE}",
    "total": rf"total capac\w+ of {_SIZE}|; {_SIZE} total capacity",
    "free": rf"of which {_SIZE} is free|; {_SIZE} free;",
    "process": rf"this process has {_SIZE} memory in use",
    "allocated": rf"allocated memory {_SIZE} is allocated by PyTorch|; {_SIZE} already allocated",
    "unused": rf"and {_SIZE} is reserved by PyTorch but unallocated",
    "private_pools": rf"with {_SIZE} allocated in private pools",
    "reserved": rf"{_SIZE} reserved in total by PyTorch",
}
GIB = 2**30
MAX_UNRESERVED_BYTES = 4 * GIB
"""Maximum GPU memory of a process besides the memory that PyTorch reserved: CUDA context, NCCL, cuBLAS."""
TYPICAL_UNRESERVED_BYTES = 1.5 * GIB


@dataclass(frozen=True)
class OutOfMemory:
    """The sizes in an out-of-memory message, in bytes; None if the message does not contain them."""

    gpu: int | None
    tried: float
    """size of the allocation that failed"""
    total: float | None
    """memory of the GPU"""
    free: float | None
    allocated: float | None
    """allocated by PyTorch in this process"""
    unused: float
    """reserved by PyTorch but unallocated"""
    others: float
    """in use by other processes; 0 if unknown"""
    others_are_named: bool = False
    """whether the message lists the other processes; otherwise `others` is the remainder of the total"""
    private_pools: float = 0.0
    """allocated in the private pools of CUDA graphs, which other allocations cannot use"""

    @property
    def shortage(self) -> float | None:
        """Bytes missing for the allocation; memory that PyTorch could release counts as free. None = unknown."""
        if self.free is None:
            return None
        return max(self.tried - self.free - self.unused, 0.0)

    @property
    def cause(self) -> str:
        """The name of the cause: gpu_memory_taken, gpu_memory_fragmented or gpu_out_of_memory."""
        if self.total and self.others > 0.3 * self.total:
            return "gpu_memory_taken"
        if self.unused - self.private_pools >= max(self.tried, 0.05 * (self.total or 0.0)):
            return "gpu_memory_fragmented"
        return "gpu_out_of_memory"

    @property
    def summary(self) -> str:
        """The sizes in a sentence: `tried to allocate 2.0 GiB; 0.7 GiB of 79.2 GiB were free: short by 1.3 GiB`."""
        text = f"tried to allocate {_format_size(self.tried)}"
        if self.free is not None and self.total is not None:
            text += f"; {_format_size(self.free)} of {_format_size(self.total)} were free"
        if self.unused:
            text += f", and {_format_size(self.unused)} reserved but unused"
        if self.others:
            text += f"; other processes used {_format_size(self.others)}"
        if self.shortage and self.cause == "gpu_out_of_memory":
            text += f": short by {_format_size(self.shortage)}"
        return text


def _format_size(size: float) -> str:
    if size >= GIB / 10:
        return f"{size / GIB:.1f} GiB"
    return f"{size / 2**20:.0f} MiB"


def parse(text: str) -> OutOfMemory | None:
    """Parse a message from PyTorch's allocator, of any version; None if it contains no sizes."""
    sizes = {name: _find_size(pattern, text) for name, pattern in _FIELDS.items()}
    tried_bytes = sizes["tried"]
    if tried_bytes is None:
        return None
    total, free, allocated = sizes["total"], sizes["free"], sizes["allocated"]
    unused = sizes["unused"] or 0.0
    if sizes["unused"] is None and sizes["reserved"] is not None and allocated is not None:
        unused = sizes["reserved"] - allocated
    listed_processes = _process_sizes(text)
    others = _bytes_of_others(total, free, allocated, unused, sizes["process"], listed_processes)
    gpu = re.search(r"\bGPU (\d+)", text)
    return OutOfMemory(
        int(gpu[1]) if gpu else None,
        tried_bytes,
        total,
        free,
        allocated,
        unused,
        others,
        others_are_named=bool(others and listed_processes),
        private_pools=sizes["private_pools"] or 0.0,
    )


def _bytes_of_others(
    total: float | None,
    free: float | None,
    allocated: float | None,
    unused: float,
    this_process: float | None,
    listed_processes: list[float],
) -> float:
    """Return the GPU memory that other processes use, in bytes; 0 unless the sizes in the message are consistent.

    In containers and virtual machines, the size of a process may be 0 or impossible, and this process may be listed
    under a different pid. This process is the one that uses slightly more memory than PyTorch has reserved.
    """
    if allocated is None:
        return 0.0
    reserved = allocated + unused
    if this_process is None:
        this_process = next(
            (size for size in listed_processes if reserved <= size <= reserved + MAX_UNRESERVED_BYTES), None
        )
        if listed_processes and this_process is None:
            return 0.0
        if this_process is not None:
            listed_processes = [size for size in listed_processes if size != this_process]
    if this_process is None:
        this_process = reserved + TYPICAL_UNRESERVED_BYTES
    if total is None or not 0.95 * reserved <= this_process <= 1.05 * total:
        return 0.0
    if listed_processes:
        return sum(listed_processes) if sum(listed_processes) <= total else 0.0
    if free is None:
        return 0.0
    return max(total - free - this_process, 0.0)


def _process_sizes(text: str) -> list[float]:
    """Return the GPU memory of each process that a message lists by pid, in bytes."""
    sizes = re.findall(rf"Process \d+ has {_SIZE} memory in use", text)
    return [float(number) * _UNITS.get(unit.upper(), 1.0) for number, unit in sizes]


def _find_size(pattern: str, text: str) -> float | None:
    """Return the size in bytes that a pattern of `_FIELDS` finds in a message; None if it finds none."""
    match = re.search(pattern, text)
    if not match:
        return None
    number, unit = [group for group in match.groups() if group is not None][:2]
    try:
        return float(number) * _UNITS[unit.upper()]
    except (ValueError, KeyError):
        return None
