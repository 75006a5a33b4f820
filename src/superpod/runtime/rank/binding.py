"""Run a rank on the CPUs beside its GPU: a step's launches, pinned copies and data workers then stay on one socket.

As `numactl --cpunodebind` does, but by what the node says of its GPUs: on a DGX H100 GPUs 0-3 hang on NUMA node 0,
on a DGX A100 GPUs 0 and 1 on 3. Memory follows: Linux puts a page where it is first touched. Standard library only.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

CHOICE = "SUPERPOD_CPU_BIND"
"""`gpu`, or anything else for none: the ranks stay where srun put them."""

_SYSFS = Path("/sys/bus/pci/devices")
_ASK = ("nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader")


def bind(environ: Mapping[str, str], sysfs: Path = _SYSFS) -> str:
    """Bind this process, and what it starts from now on, to the CPUs of its GPU; returns what was done, in words.

    '' when nothing is to be done: not wanted, or no GPU here. Never raises: an unbound rank is slower, not wrong.
    """
    if environ.get(CHOICE) != "gpu" or not (address := _address(environ)):
        return ""
    try:
        near = cpus((sysfs / address / "local_cpulist").read_text())
        node = (sysfs / address / "numa_node").read_text().strip()
        allowed = os.sched_getaffinity(0)
    except (OSError, ValueError) as error:
        return f"not bound to CPUs: {error}"
    if not near & allowed:
        return f"not bound to CPUs: Slurm gave none of those beside the GPU ({listed(near)}), but {listed(allowed)}"
    os.sched_setaffinity(0, near & allowed)
    return f"bound to CPUs {listed(near & allowed)}, NUMA node {node} of GPU {address}"


def _address(environ: Mapping[str, str]) -> str:
    """The PCI address of this rank's GPU as sysfs writes it, 0000:1b:00.0; '' where there is no GPU."""
    try:
        answer = subprocess.run(_ASK, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    gpus = [[part.strip() for part in line.split(",")] for line in answer.splitlines() if line.count(",") == 2]
    visible = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    # As CUDA reads it: indices, or the beginnings of UUIDs.
    order = [gpu for name in visible for gpu in gpus if gpu[0] == name or gpu[1].startswith(name)] or gpus
    local = int(environ.get("LOCAL_RANK") or 0)
    # nvidia-smi writes the domain with eight digits, the kernel with four.
    match = re.fullmatch(r"0*([0-9A-Fa-f]{4}:[0-9A-Fa-f:.]+)", order[local][2]) if local < len(order) else None
    return match[1].lower() if match else ""


def cpus(text: str) -> set[int]:
    """The numbers in a list of the kernel: `0-3,8` is 0, 1, 2, 3 and 8. Raises ValueError for another text."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def listed(numbers: set[int]) -> str:
    """The same text for a set of numbers."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
