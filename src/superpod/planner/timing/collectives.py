"""Seconds of a collective operation, by latency and bandwidth on two tiers: inside an NVLink domain, between domains.

`volumes` counts the bytes that one GPU moves on either tier and the latencies that the operation waits for; `seconds`
divides them by bandwidths. All arguments may be numpy arrays. Volumes are those of NCCL tests, `PERFORMANCE.md` (bus
bandwidth): all-reduce 2S(n-1)/n, all-gather, reduce-scatter and all-to-all S(n-1)/n.
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
"""How often a ring passes the whole buffer."""


@dataclass(frozen=True)
class Links:
    """Bandwidths and latencies of one GPU, one way. NCCL reaches less than the nominal: see calibration."""

    near_bytes_per_s: float
    """Inside an NVLink domain."""
    far_bytes_per_s: float
    """Between domains, when all GPUs of a node send at once."""
    near_s: float = 0.0
    """Latency of one step of a ring inside a domain."""
    far_s: float = 0.0
    """Latency of one step between domains."""


def links(node: Node, fabric: Fabric, *, near: float = 1.0, far: float = 1.0, near_us: float = 0.0) -> Links:
    """The links of one GPU; `near` and `far` are the shares of the nominal bandwidth that NCCL reaches."""
    gpu = node.gpu
    # Without NVLink, GPUs reach each other over PCIe; half of its bandwidth is assumed.
    nominal = (gpu.nvlink_gb_per_s if node.nvlink_domain > 1 else 0.0) or gpu.pcie_gb_per_s / 2
    return Links(
        nominal * near * 1e9, inter_domain_gb_per_s(node, fabric) * far * 1e9, near_us * 1e-6, fabric.latency_us * 1e-6
    )


def inter_domain_gb_per_s(node: Node, fabric: Fabric) -> float:
    """GB/s one way of one GPU between domains. A node without a network port reaches others as fast as its host."""
    return fabric.gb_per_s_per_gpu(node) or node.gpu.pcie_gb_per_s / node.gpus


@dataclass(frozen=True)
class Volumes:
    """What one GPU moves on each tier, bytes, and the steps that it waits for on each."""

    near: Number
    far: Number
    near_steps: Number
    far_steps: Number


def volumes(operation: Operation, size: Number, ranks: Number, near_ranks: Number) -> Volumes:
    """Bytes and steps of one operation.

    Args:
        operation: `send` is from one pipeline stage to the next.
        size: bytes of the whole buffer (of what one rank sends, for `send` and `all_to_all`).
        ranks: GPUs that take part.
        near_ranks: of them, those in one NVLink domain.

    A ring over d domains enters and leaves each over the network ports of all its g members at once (NCCL's rails), so
    that each port carries a share 1/g of the ring's traffic, while NVLink carries all of it.

    Raises:
        UserError: when there is no such operation.
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
    """Seconds of one operation; both tiers work at once, and the slower one is waited for. Arguments as `volumes`."""
    v = volumes(operation, size, ranks, near_ranks)
    moving = np.maximum(v.near / over.near_bytes_per_s, v.far / over.far_bytes_per_s)
    return moving + v.near_steps * over.near_s + v.far_steps * over.far_s
