"""Bind a rank to the CPUs of its GPU's NUMA node, so that its threads and data workers run on the GPU's socket.

This has the effect of `numactl --cpunodebind`, but uses the topology that the node reports: on a DGX H100, GPUs 0-3 are
attached to NUMA node 0; on a DGX A100, GPUs 0 and 1 to node 3. Memory follows, since Linux allocates a page on the node
of the CPU that first writes to it. Standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from superpod.runtime.processes.command import output_of

BINDING_VARIABLE = "SUPERPOD_CPU_BIND"
"""Environment variable: `gpu` to bind ranks to the CPUs of their GPUs; any other value keeps srun's binding."""

_SYSFS = Path("/sys/bus/pci/devices")
_GPU_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader")


def bind(environ: Mapping[str, str], sysfs: Path = _SYSFS) -> str:
    """Bind this process and its future children to the CPUs of its GPU; return a message, with the reason on failure.

    The message is '' if binding is not requested or there is no GPU. No error is raised, since an unbound rank is only
    slower.
    """
    if environ.get(BINDING_VARIABLE) != "gpu":
        return ""
    address = _find_gpu(environ)
    if not address:
        return ""
    try:
        near_cpus = parse_cpus((sysfs / address / "local_cpulist").read_text())
        node = (sysfs / address / "numa_node").read_text().strip()
        allowed = os.sched_getaffinity(0)
    except (OSError, ValueError) as error:
        return f"not bound to CPUs: {error}"
    cpus = near_cpus & allowed
    if not cpus:
        allocated, near = format_cpus(allowed), format_cpus(near_cpus)
        return f"not bound to CPUs: Slurm allocated {allocated}, but those of the GPU are {near}"
    os.sched_setaffinity(0, cpus)
    return f"bound to CPUs {format_cpus(cpus)}, NUMA node {node} of GPU {address}"


def _find_gpu(environ: Mapping[str, str]) -> str:
    """Return the PCI address of this rank's GPU in the format of sysfs (0000:1b:00.0); '' if there is none."""
    output = output_of([*_GPU_QUERY], timeout_s=60) or ""
    gpus = [[part.strip() for part in line.split(",")] for line in output.splitlines() if line.count(",") == 2]
    visible_devices = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    # CUDA accepts indices and prefixes of UUIDs.
    order = [gpu for name in visible_devices for gpu in gpus if gpu[0] == name or gpu[1].startswith(name)] or gpus
    local = int(environ.get("LOCAL_RANK") or 0)
    # nvidia-smi writes the domain with eight digits, the kernel with four.
    match = re.fullmatch(r"0*([0-9A-Fa-f]{4}:[0-9A-Fa-f:.]+)", order[local][2]) if local < len(order) else None
    return match[1].lower() if match else ""


def parse_cpus(text: str) -> set[int]:
    """Parse a CPU list in the kernel's format: `0-3,8` yields 0, 1, 2, 3 and 8. Raises ValueError for other formats."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def format_cpus(numbers: set[int]) -> str:
    """Format a set of CPUs as in sysfs: `0-3,8`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
