"""Measured times of kernels: matrix products and causal attention, from `data/kernels/GPU.csv`.

A table holds, on a grid of powers of two, how many times the ideal a kernel takes; between the points it is
interpolated in logarithms, beyond them its edge holds. `benchmarks/condense_kernels.py` writes the tables from
measurements, and says whose. A GPU without a table takes the ratios of its generation's, over its own peak and
bandwidth.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from superpod.planner.arrays import Array, Number
from superpod.planner.calibration import corrections
from superpod.planner.formats import files
from superpod.planner.hardware import Gpu

FOLDER = Path(__file__).parents[1] / "data" / "kernels"
LAUNCH_S = 2e-6
"""Part of the ideal: the shortest kernel of a table takes about that."""
SIDES = tuple(2.0**i for i in range(7, 17))
"""Points of a product's sides: 128 to 65,536."""
SEQUENCES = tuple(2.0**i for i in range(9, 15))
"""Points of attention's tokens in a sequence: 512 to 16,384."""
HEADS = tuple(2.0**i for i in range(13))
"""Points of attention's heads, over all samples of a micro-batch: 1 to 4,096."""
CHANNELS = (64, 128, 256)
"""Widths of a head that were measured on every GPU."""
MEASURED_AS = {"fp8": "fp8cs", "fp8ds": "fp8cs", "mxfp8": "fp8cs", "fp16": "bf16", "fp32": "bf16", "tf32": "bf16"}
"""Precisions without measurements of their own, and those whose ratios they take."""


@dataclass(frozen=True)
class Table:
    """Logarithms of time over ideal, by precision on (m, n, k) and by width of a head on (sequence, heads)."""

    products: dict[str, Array]
    attention: dict[int, Array]


@cache
def load_table(gpu: Gpu) -> Table:
    """The table of a GPU, or of another of its generation."""
    path = FOLDER / f"{corrections.decode(gpu.calibrated_as or gpu.name)[0]}.csv"
    return _read(path if path.exists() else FOLDER / f"{generation(gpu)['table']}.csv")


def generation(gpu: Gpu) -> dict[str, Any]:
    """What holds for a GPU's generation; one that is not known is taken for the newest."""
    tables = _generations()
    return tables.get(gpu.generation, list(tables.values())[-1])


@cache
def _generations() -> dict[str, Any]:
    return files.read_toml(FOLDER / "generations.toml")


@cache
def _read(path: Path) -> Table:
    products: dict[str, Array] = {}
    attention: dict[int, Array] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for kind, of_what, first, second, *ratios in csv.reader(line for line in file if not line.startswith("#")):
            logs = np.log(np.array(ratios, dtype=float))
            if kind == "product":
                grid = products.setdefault(of_what, np.zeros((len(SIDES),) * 3))
                grid[:, SIDES.index(float(first)), SIDES.index(float(second))] = logs
            else:
                grid = attention.setdefault(int(of_what), np.zeros((len(SEQUENCES), len(HEADS))))
                grid[SEQUENCES.index(float(first))] = logs
    return Table(products, attention)


def element_bytes(precision: str) -> float:
    """Bytes of an operand's element with its share of the scales: one for 16 elements in NVFP4, for 32 in MXFP8."""
    return {"nvfp4": 0.5625, "mxfp8": 1.03, "bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "tf32": 4.0}.get(precision, 1.0)


def ideal(gpu: Gpu, flops: Number, tflops: float, passed: Number) -> Number:
    """Seconds at the peak, of bytes at full bandwidth, and of a launch: what ratios are over."""
    return flops / (tflops * 1e12) + passed / (gpu.hbm_tb_per_s * 1e12) + LAUNCH_S


def ideal_gemm(gpu: Gpu, precision: str, m: Number, n: Number, k: Number) -> Number:
    """Ideal seconds of an m x k by k x n product, whose result has 2 bytes an element (4 in FP32)."""
    element = element_bytes(precision)
    passed = element * (m * k + k * n) + max(element, 2.0) * m * n
    return ideal(gpu, 2.0 * m * n * k, gpu.tflops(precision), passed)


def gemm(gpu: Gpu, precision: str, m: Number, n: Number, k: Number) -> Array:
    """Seconds of an m x k by k x n product."""
    grids = load_table(gpu).products
    grid = grids.get(MEASURED_AS.get(precision, precision), grids["bf16"])
    ratio: Array = np.exp(_between(grid, [(m, SIDES), (n, SIDES), (k, SIDES)]))
    return ratio * np.asarray(ideal_gemm(gpu, precision, m, n, k), dtype=np.float64)


def ideal_attention(
    gpu: Gpu, precision: str, tokens: Number, sequence: Number, query: Number, out: Number, keys: Number
) -> Number:
    """Ideal seconds of causal attention forward; widths in elements per token: queries, output, keys with values."""
    flops = tokens * sequence * (query + out)  # fused kernels skip what the mask hides
    return ideal(gpu, flops, gpu.tflops(precision), element_bytes(precision) * tokens * (query + out + keys))


def attention(gpu: Gpu, sequence: Number, heads: Number, channels: float) -> Array:
    """Times over the ideal that causal attention takes forward; `heads`: of all samples of a micro-batch."""
    nearest = min(CHANNELS, key=lambda width: abs(np.log2(width / max(channels, 1.0))))
    return np.exp(_between(load_table(gpu).attention[nearest], [(sequence, SEQUENCES), (heads, HEADS)]))


def chunked_scan(gpu: Gpu, flops: Number) -> Number:
    """Seconds of a recurrence in chunks, forward, at the rate of a gated delta rule: far from any peak."""
    return flops / (float(generation(gpu)["delta_rule_tflops"]) * 1e12)


def _between(grid: Array, at: list[tuple[Number, tuple[float, ...]]]) -> Array:
    """The grid's value at points given in the units of its axes, linear between logarithms."""
    corners: list[tuple[Array, Array]] = []
    for value, axis in at:
        x = np.clip(np.log2(np.maximum(value, 1e-9) / axis[0]), 0, len(axis) - 1)
        low = np.minimum(x.astype(np.int64), len(axis) - 2)
        corners.append((low, x - low))
    total: Array | float = 0.0
    for corner in np.ndindex(*(2,) * len(at)):
        index, weight = [], 1.0
        for (low, share), up in zip(corners, corner, strict=True):
            index.append(low + up)
            weight = weight * (share if up else 1 - share)
        total = total + weight * grid[tuple(index)]
    return np.asarray(total)
