"""Condense measured kernels to the planner's tables, planner/data/kernels/GPU.csv.

`python benchmarks/condense_kernels.py FOLDER` reads `systems/data` of NVIDIA's aiconfigurator-core 0.12.0 (Apache-2.0;
`pip download --no-deps`, unzipped). If several inference engines measured a kernel, the fastest counts. The value of a
grid point is the mean of log(time / ideal) over the kernels around it, weighted by distance. The kernels of
benchmarks/reference/kernels.csv are held out, so that `benchmarks/kernels.py` scores the tables on unseen kernels.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))

import kernels

from superpod.planner import hardware
from superpod.planner.timing import kernel_times
from superpod.planner.timing.kernel_times import CHANNELS, HEADS, SEQUENCES, SIDES

Array = NDArray[np.float64]
REACH = 0.35
"""Distance in octaves at which the weight of a kernel is 0.6."""
HEAD = """\
# {gpu}: measured kernels, as times over the ideal (kernel_times.py). Written by condense_kernels.py
# from NVIDIA's aiconfigurator-core 0.12.0, systems/data/{folder} (Apache-2.0), {rows:,} kernels of {engines}.
# product, precision, n, k: m = 128 to 65,536.   attention, width of a head, sequence: heads = 1 to 4,096.
"""


def grid(points: Array, logs: Array, axes: Sequence[tuple[float, ...]]) -> Array:
    """Return the weighted mean of `logs` around each grid point; points without kernels have the mean of neighbors."""
    at = np.stack([np.log2(p / axis[0]) for p, axis in zip(points, axes, strict=True)])
    shape = tuple(len(axis) for axis in axes)
    total, weights = np.zeros(shape), np.zeros(shape)
    for step in itertools.product((-1, 0, 1), repeat=len(axes)):
        cell = [np.clip(np.rint(x).astype(int) + s, 0, size - 1) for x, s, size in zip(at, step, shape, strict=True)]
        distance = sum((x - c) ** 2 for x, c in zip(at, cell, strict=True))
        weight = np.exp(-distance / (2 * REACH**2))
        np.add.at(total, tuple(cell), weight * logs)
        np.add.at(weights, tuple(cell), weight)
    return _fill_gaps(np.where(weights > 1e-6, total / np.maximum(weights, 1e-9), np.nan))


def _fill_gaps(values: Array) -> Array:
    """Replace missing values by the mean of their neighbors, repeatedly until none is missing."""
    while np.isnan(values).any():
        padded = np.pad(values, 1, constant_values=np.nan)
        neighbors = []
        for axis, step in itertools.product(range(values.ndim), (-1, 1)):
            rolled = np.roll(padded, step, axis)
            neighbors.append(rolled[(slice(1, -1),) * values.ndim])
        known = ~np.isnan(neighbors)
        mean = np.where(known, neighbors, 0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
        values = np.where(np.isnan(values) & known.any(axis=0), mean, values)
    return values


def products(gpu: hardware.Gpu, rows: list[kernels.Row]) -> Iterator[list[str]]:
    """Yield the lines of a GPU's GEMMs."""
    for precision in kernels.PRECISIONS.values():
        mine = [row for row in rows if row["kind"] == "product" and row["precision"] == precision]
        if not mine or precision not in gpu.precisions:
            continue
        m, n, k, us = np.array([[row[key] for key in ("m", "n", "k", "us")] for row in mine], dtype=float).T
        over = kernel_times.ideal_gemm(gpu, precision, m, n, k)
        values = grid(np.stack([m, n, k]), np.log(us * 1e-6 / over), (SIDES, SIDES, SIDES))
        for j, i in itertools.product(range(len(SIDES)), range(len(SIDES))):
            yield ["product", precision, f"{SIDES[j]:.0f}", f"{SIDES[i]:.0f}", *_format_ratios(values[:, j, i])]


def attentions(gpu: hardware.Gpu, rows: list[kernels.Row]) -> Iterator[list[str]]:
    """Yield the lines of a GPU's causal attention; head sizes without measurements have those of 128."""
    for channels in CHANNELS:
        mine = [row for row in rows if row["kind"] == "attention" and row["head_dim"] == channels]
        mine = mine or [row for row in rows if row["kind"] == "attention" and row["head_dim"] == 128]
        batch, seq, heads, groups, width, us = np.array(
            [[row[key] for key in ("batch", "seq", "heads", "kv_heads", "head_dim", "us")] for row in mine], dtype=float
        ).T
        query, keys = heads * width, 2 * groups * width
        over = kernel_times.ideal_attention(gpu, "bf16", batch * seq, seq, query, query, keys)
        values = grid(np.stack([seq, batch * heads]), np.log(us * 1e-6 / over), (SEQUENCES, HEADS))
        for i, sequence in enumerate(SEQUENCES):
            yield ["attention", str(channels), f"{sequence:.0f}", "", *_format_ratios(values[i])]


def _format_ratios(logs: Array) -> list[str]:
    """Format the ratios of a line."""
    return [f"{ratio:.2f}" for ratio in np.exp(logs)]


def main(data: Path) -> int:
    """Write the tables of all GPUs from the measurements in `data`."""
    held_out = {kernels.identity(row) for row in kernels.read()}
    for gpu, folder in kernels.GPUS.items():
        rows = [row for row in kernels.fastest(data / folder) if kernels.identity({"gpu": gpu, **row}) not in held_out]
        head = HEAD.format(
            gpu=gpu, folder=folder, rows=len(rows), engines=", ".join(sorted({row["source"] for row in rows}))
        )
        chip = hardware.node(gpu).gpu
        lines = [",".join(words) for words in (*products(chip, rows), *attentions(chip, rows))]
        (kernel_times.FOLDER / f"{gpu}.csv").write_text(head + "\n".join(lines) + "\n")
        print(f"{gpu}: {len(rows):,} kernels, {len(lines)} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
