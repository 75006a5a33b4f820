"""Compute the duration of collectives from latency and bandwidth on two tiers: within and between NVLink domains.

`volumes` returns the bytes that one GPU moves on each tier and the number of latencies; `seconds` divides by the
bandwidths. All arguments may be numpy arrays. Volumes as in nccl-tests, `PERFORMANCE.md` (bus bandwidth): all-reduce
2S(n-1)/n; all-gather, reduce-scatter and all-to-all S(n-1)/n.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from superpod.errors import UserError
from superpod.planner.arrays import Number
from superpod.planner.hardware import Fabric, Node

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
ROUNDS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""Operation -> number of times that a ring passes the entire buffer."""


@dataclass(frozen=True)
class Links:
    """Unidirectional bandwidths and latencies of one GPU. NCCL achieves less than the nominal values (calibration)."""

    near_bytes_per_s: float
    """Bandwidth within an NVLink domain."""
    far_bytes_per_s: float
    """Bandwidth between domains, if all GPUs of a node send at the same time."""
    near_s: float = 0.0
    """Latency of one ring step within a domain."""
    far_s: float = 0.0
    """Latency of one step between domains."""


def links(node: Node, fabric: Fabric, *, near: float = 1.0, far: float = 1.0, near_us: float = 0.0) -> Links:
    """Return the links of one GPU; `near` and `far`: fractions of the nominal bandwidth that NCCL achieves."""
    gpu = node.gpu
    # Without NVLink, GPUs communicate over PCIe; half of its bandwidth is assumed.
    nominal = (gpu.nvlink_gb_per_s if node.nvlink_domain > 1 else 0.0) or gpu.pcie_gb_per_s / 2
    return Links(
        nominal * near * 1e9, inter_domain_gb_per_s(node, fabric) * far * 1e9, near_us * 1e-6, fabric.latency_us * 1e-6
    )


def inter_domain_gb_per_s(node: Node, fabric: Fabric) -> float:
    """Return the unidirectional bandwidth between domains per GPU, in GB/s; PCIe limits nodes without network ports."""
    return fabric.gb_per_s_per_gpu(node) or node.gpu.pcie_gb_per_s / node.gpus


@dataclass(frozen=True)
class Volumes:
    """Bytes that one GPU moves on each tier, and the number of steps on each tier."""

    near: Number
    far: Number
    near_steps: Number
    far_steps: Number


def volumes(operation: Operation, size: Number, ranks: Number, near_ranks: Number) -> Volumes:
    """Return the bytes that one GPU moves, and the number of steps, on each tier in one operation.

    Args:
        operation: the collective; `send` is from one pipeline stage to the next.
        size: bytes of the entire buffer (for `send` and `all_to_all`: bytes that one rank sends).
        ranks: number of participating GPUs.
        near_ranks: number of these GPUs in one NVLink domain.

    A ring over d domains enters and leaves each domain over the network ports of all its g members (NCCL rails), so
    that each port carries 1/g of the ring's traffic, while NVLink carries all of it.

    Raises:
        UserError: the operation is unknown.
    """
    n = np.maximum(ranks, 1)
    g = np.clip(near_ranks, 1, n)
    domains = n / g
    many = n > 1
    crosses = many & (domains > 1)
    if operation == "send":
        return Volumes(size * many * (g > 1), size * crosses * (g == 1), many * (g > 1) * 1.0, crosses * (g == 1) * 1.0)
    if operation == "all_to_all":
        return Volumes(size * (g - 1) / n, size * (n - g) / n, (g > 1) * 1.0, crosses * 1.0)
    if operation not in ROUNDS:
        raise UserError(f"there is no collective {operation!r}", f"use {', '.join(ROUNDS)}, all_to_all or send")
    moved = ROUNDS[operation] * size * (n - 1) / n
    steps = ROUNDS[operation] * np.log2(domains)  # trees, or rings pipelined over many chunks
    return Volumes(moved * (g > 1), moved * crosses / g, ROUNDS[operation] * (g > 1), steps)


def seconds(operation: Operation, size: Number, ranks: Number, near_ranks: Number, over: Links) -> Number:
    """Return the duration of one operation in seconds; both tiers transfer concurrently. Arguments: see `volumes`."""
    v = volumes(operation, size, ranks, near_ranks)
    moving = np.maximum(v.near / over.near_bytes_per_s, v.far / over.far_bytes_per_s)
    return moving + v.near_steps * over.near_s + v.far_steps * over.far_s
