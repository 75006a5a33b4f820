"""Read measured kernel times of GEMMs and causal attention from `data/kernels/GPU.csv`.

A table contains the ratios of measured to ideal time on a grid of powers of two, which are interpolated in logarithms;
outside the grid, the values at its edge apply. `benchmarks/condense_kernels.py` writes the tables from measurements,
and lists their sources. GPUs without a table use the ratios of another GPU of their generation.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from superpod.planner import hardware
from superpod.planner.arrays import Array, Number
from superpod.planner.calibration import corrections
from superpod.planner.formats import config_files
from superpod.planner.hardware import Gpu

FOLDER = Path(__file__).parents[1] / "data" / "kernels"
LAUNCH_S = 2e-6
"""Launch time in the ideal time; the shortest kernels in the tables take about this long."""
SIDES = tuple(2.0**i for i in range(7, 17))
"""Grid of GEMM dimensions: 128 to 65,536."""
SEQUENCES = tuple(2.0**i for i in range(9, 15))
"""Grid of sequence lengths of attention: 512 to 16,384."""
HEADS = tuple(2.0**i for i in range(13))
"""Grid of heads of attention, over all samples of a micro-batch: 1 to 4,096."""
CHANNELS = (64, 128, 256)
"""Head sizes that were measured on all GPUs."""
MEASURED_AS = {"fp8": "fp8cs", "fp8ds": "fp8cs", "mxfp8": "fp8cs", "fp16": "bf16", "fp32": "bf16", "tf32": "bf16"}
"""Precision without measurements -> precision whose ratios are used."""


@dataclass(frozen=True)
class Table:
    """Logarithms of the ratios of measured to ideal time on one GPU."""

    products: dict[str, Array]
    """Precision -> values on the grid (m, n, k)."""
    attention: dict[int, Array]
    """Head size -> values on the grid (sequence, heads)."""


@cache
def load_table(gpu: Gpu) -> Table:
    """Return the table of a GPU; if it has none, that of another GPU of its generation."""
    path = FOLDER / f"{corrections.decode(gpu.calibrated_as or gpu.name)[0]}.csv"
    return _read(path if path.exists() else FOLDER / f"{generation(gpu)['table']}.csv")


@cache
def weaker(gpu: Gpu, precision: str) -> tuple[Gpu, ...]:
    """Return the built-in GPUs with at most the peaks and bandwidth of a GPU; of those with one table, the best."""
    others = [one for one in hardware.builtin().gpus.values() if precision in one.precisions and _is_better(gpu, one)]
    return tuple(
        one
        for one in others
        if not any(_is_better(other, one) and load_table(other) is load_table(one) for other in others)
    )


def _is_better(a: Gpu, b: Gpu) -> bool:
    peaks_a, peaks_b = (
        (gpu.bf16_tflops, gpu.fp16_tflops, gpu.fp8_tflops, gpu.nvfp4_tflops, gpu.hbm_tb_per_s) for gpu in (a, b)
    )
    return peaks_a != peaks_b and all(x >= y for x, y in zip(peaks_a, peaks_b, strict=True))


def generation(gpu: Gpu) -> dict[str, Any]:
    """Return the properties of a GPU's generation; an unknown generation is treated as the newest."""
    tables = _generations()
    return tables.get(gpu.generation, list(tables.values())[-1])


@cache
def _generations() -> dict[str, Any]:
    """Return the tables of `generations.toml`, the newest generation last."""
    return config_files.read_toml(FOLDER / "generations.toml")


@cache
def _read(path: Path) -> Table:
    """Read the CSV file of a table."""
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
    """Return the bytes per element of a GEMM operand, including scales (per 16 elements in NVFP4, 32 in MXFP8)."""
    return {"nvfp4": 0.5625, "mxfp8": 1.03, "bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "tf32": 4.0}.get(precision, 1.0)


def ideal_seconds(gpu: Gpu, flops: Number, tflops: float, passed: Number) -> Number:
    """Return the ideal time in seconds: FLOPs at peak, plus `passed` bytes at HBM bandwidth, plus a launch."""
    return flops / (tflops * 1e12) + passed / (gpu.hbm_tb_per_s * 1e12) + LAUNCH_S


def _gemm_bytes(precision: str, m: Number, n: Number, k: Number, groups: Number) -> Number:
    """Return the bytes of both operands and of the output, which has 2 bytes per element, in FP32 4."""
    element = element_bytes(precision)
    return groups * (element * (m * k + k * n) + max(element, 2.0) * m * n)


def ideal_gemm(gpu: Gpu, precision: str, m: Number, n: Number, k: Number, groups: Number = 1) -> Number:
    """Return the ideal time in seconds of a (grouped) GEMM."""
    passed = _gemm_bytes(precision, m, n, k, groups)
    return ideal_seconds(gpu, 2.0 * groups * m * n * k, gpu.tflops(precision), passed)


def gemm(gpu: Gpu, precision: str, m: Number, n: Number, k: Number, groups: Number = 1) -> Array:
    """Return the time in seconds of an m x k by k x n GEMM, or of a grouped GEMM with `groups` of these.

    A grouped GEMM fills the GPU like one with `groups` times the rows, but reads a matrix per group.
    """
    arithmetic, other = gemm_parts((gpu,), precision, m, n, k, groups)
    return (arithmetic + other)[0]


def gemm_parts(
    gpus: tuple[Gpu, ...], precision: str, m: Number, n: Number, k: Number, groups: Number = 1
) -> tuple[Array, Array]:
    """Return the seconds of arithmetic, and those of memory traffic and the launch, of a GEMM on each GPU."""
    ratio = np.exp(_interpolate(_product_grids(gpus, precision), [(m * groups, SIDES), (n, SIDES), (k, SIDES)]))
    shape = (len(gpus),) + (1,) * (ratio.ndim - 1)
    flops, hbm = (np.reshape(rates, shape) for rates in _rates(gpus, precision))
    passed = _gemm_bytes(precision, m, n, k, groups)
    return ratio * (2.0 * groups * m * n * k / flops), ratio * (passed / hbm + LAUNCH_S)


@cache
def _product_grids(gpus: tuple[Gpu, ...], precision: str) -> Array:
    tables = [load_table(gpu).products for gpu in gpus]
    return np.stack([grids.get(MEASURED_AS.get(precision, precision), grids["bf16"]) for grids in tables])


@cache
def _rates(gpus: tuple[Gpu, ...], precision: str) -> tuple[Array, Array]:
    """Return the peak FLOP/s and the memory bandwidth of GPUs."""
    return np.array([gpu.tflops(precision) * 1e12 for gpu in gpus]), np.array([gpu.hbm_tb_per_s * 1e12 for gpu in gpus])


def ideal_attention(
    gpu: Gpu, precision: str, tokens: Number, sequence: Number, query: Number, out: Number, keys: Number
) -> Number:
    """Return the ideal time in seconds of the forward pass of causal attention.

    `query`, `out` and `keys` are widths in elements per token: of queries, of the output, of keys and values together.
    """
    flops = tokens * sequence * (query + out)  # fused kernels skip masked scores
    return ideal_seconds(gpu, flops, gpu.tflops(precision), element_bytes(precision) * tokens * (query + out + keys))


def attention(gpu: Gpu, sequence: Number, heads: Number, channels: float) -> Array:
    """Return the ratio of measured to ideal time of causal attention (forward); `heads`: over all samples."""
    nearest_channels = min(CHANNELS, key=lambda width: abs(np.log2(width / max(channels, 1.0))))
    return np.exp(_interpolate(load_table(gpu).attention[nearest_channels], [(sequence, SEQUENCES), (heads, HEADS)]))


def chunked_scan(gpu: Gpu, flops: Number) -> Number:
    """Return the time in seconds of a chunked recurrence (forward), at the measured rate of a gated delta rule."""
    return flops / (float(generation(gpu)["delta_rule_tflops"]) * 1e12)


def _interpolate(grid: Array, at: list[tuple[Number, tuple[float, ...]]]) -> Array:
    """Interpolate a grid over its last axes at points in their units, linearly in their logarithms."""
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
        total = total + weight * grid[(..., *index)]
    return np.asarray(total)
