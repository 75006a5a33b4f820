"""Compare the planner's kernel tables with held-out measured kernels: GEMMs and causal attention.

`python benchmarks/kernels.py` reads benchmarks/reference/kernels.csv. With `--from FOLDER`, it first writes that table
from `systems/data` of NVIDIA's aiconfigurator-core 0.12.0 (Apache-2.0; `pip download --no-deps`, unzipped). If several
inference engines measured a kernel, the fastest counts.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from superpod.planner import hardware
from superpod.planner.timing import kernel_times

REFERENCE = Path(__file__).parent / "reference" / "kernels.csv"
GPUS = {
    **{"l40s": "l40s", "a100": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm"},
    **{"b300": "b300_sxm", "gb200": "gb200", "gb300": "gb300"},
}
"""GPU -> folder of its measurements."""
PRECISIONS = {"bfloat16": "bf16", "fp8": "fp8cs", "fp8_block": "fp8bw", "nvfp4": "nvfp4"}
"""Data type of a measured GEMM -> precision."""
SIDES = ("m", "n", "k")
ATTENTION = ("batch", "seq", "heads", "kv_heads", "head_dim")
LEAST, MOST = 128, 65_536
"""Minimum and maximum of the GEMM dimensions that are read."""
SAMPLED_FROM = {"m": 2048, "n": 1024, "k": 1024}
"""Minimum GEMM dimensions in the sample; smaller GEMMs occur in generation, not in training."""
SAMPLED = 40
"""Number of sampled kernels per GPU, kind and precision, selected by hash."""
COLUMNS: tuple[str, ...] = ("gpu", "kind", "precision", *SIDES, *ATTENTION, "us", "source")
Row = dict[str, Any]


def products(folder: Path) -> Iterator[Row]:
    """Yield the GEMMs in a GPU's folder with dimensions between LEAST and MOST."""
    for path in sorted(folder.glob("gemm/*/*/*.parquet")):
        for row in _read(path, ("gemm_dtype", "m", "n", "k", "latency")):
            sides = {side: int(row[side]) for side in SIDES}
            is_in_range = all(LEAST <= size <= MOST and size % 8 == 0 for size in sides.values())
            if is_in_range and row["gemm_dtype"] in PRECISIONS:
                yield {"kind": "product", "precision": PRECISIONS[row["gemm_dtype"]], **sides, **_measured(row, path)}


def attentions(folder: Path) -> Iterator[Row]:
    """Yield the causal attention over complete sequences in BF16 in a GPU's folder."""
    columns = ("attn_dtype", "kv_cache_dtype", "window_size", "batch_size", "isl", "num_heads", "num_key_value_heads",
               "head_dim", "step", "latency")  # fmt: skip
    for path in sorted(folder.glob("attention/*/*/context_attention_perf.parquet")):
        for row in _read(path, columns):
            plain = row["attn_dtype"] == row["kv_cache_dtype"] == "bfloat16" and not row["window_size"]
            if plain and not row["step"] and row["isl"] >= 512:
                yield {
                    "kind": "attention", "precision": "bf16", "batch": row["batch_size"], "seq": row["isl"],
                    "heads": row["num_heads"], "kv_heads": row["num_key_value_heads"], "head_dim": row["head_dim"],
                } | _measured(row, path)  # fmt: skip


def _read(path: Path, columns: tuple[str, ...]) -> list[Row]:
    """Return columns of a Parquet file; missing columns are 0."""
    import pyarrow.parquet as parquet

    existing = set(parquet.read_schema(path).names)  # older tables have no windows
    rows = parquet.read_table(path, columns=[name for name in columns if name in existing]).to_pylist()
    return [dict.fromkeys(columns, 0) | row for row in rows]


def _measured(row: Row, path: Path) -> Row:
    """Return the measured time in microseconds and its source."""
    engine, version = path.parts[-3:-1]
    return {"us": round(1000 * row["latency"], 2), "source": f"{engine} {version}"}


def fastest(folder: Path) -> list[Row]:
    """Return the kernels in a GPU's folder, each with the time of the fastest engine."""
    rows: dict[str, Row] = {}
    for row in (*products(folder), *attentions(folder)):
        key = identity(row)
        if row["us"] > 0 and (key not in rows or row["us"] < rows[key]["us"]):
            rows[key] = row
    return list(rows.values())


def sample(data: Path) -> list[Row]:
    """Return `SAMPLED` kernels of training sizes per GPU, kind and precision."""
    rows: list[Row] = []
    for gpu, folder in GPUS.items():
        kinds: dict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in fastest(data / folder):
            if _is_of_training(row) and row["precision"] in hardware.node(gpu).gpu.precisions:
                kinds[row["kind"], row["precision"]].append({"gpu": gpu, **row})
        for members in kinds.values():
            rows += sorted(members, key=_hash)[:SAMPLED]
    return sorted(rows, key=lambda row: [str(row.get(name, "")) for name in COLUMNS[:3]] + [_hash(row)])


def _is_of_training(row: Row) -> bool:
    """Return whether a kernel has a size that occurs in training."""
    if row["kind"] == "attention":
        return row["seq"] >= 1024 and row["head_dim"] == 128
    return all(row[side] >= least and row[side] % 128 == 0 for side, least in SAMPLED_FROM.items())


def identity(row: Mapping[str, Any]) -> str:
    """Return a key for a kernel, which is the same in the table and in the measurements."""
    return ",".join(str(row.get(name) or "") for name in COLUMNS[:-2])


def _hash(row: Mapping[str, Any]) -> str:
    return hashlib.sha256(repr([row.get(name) for name in COLUMNS[1:-2]]).encode()).hexdigest()


def write(rows: list[Row], out: Path) -> None:
    """Write the table as CSV."""
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read() -> list[dict[str, str]]:
    """Return the rows of the table."""
    with REFERENCE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def modelled(row: Mapping[str, str]) -> tuple[float, float]:
    """Return (seconds at peak, seconds in the planner's table) of a kernel; see `planner/timing/kernel_times.py`."""
    gpu = hardware.node(row["gpu"]).gpu
    if row["kind"] == "product":
        m, n, k = (float(row[side]) for side in SIDES)
        table = kernel_times.gemm(gpu, row["precision"], m, n, k)
        return 2 * m * n * k / (gpu.tflops(row["precision"]) * 1e12), float(table)
    batch, seq, heads, groups, width = (float(row[name]) for name in ATTENTION)
    query, keys = heads * width, 2 * groups * width
    over = kernel_times.ideal_attention(gpu, "bf16", batch * seq, seq, query, query, keys)
    ratio = kernel_times.attention(gpu, seq, batch * heads, width)
    return 2 * batch * seq * seq * query / (gpu.bf16_tflops * 1e12), float(over * ratio)


def main() -> None:
    """Print a line per GPU, kind and precision."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="data", type=Path, help="systems/data of aiconfigurator-core")
    options = parser.parse_args()
    if options.data:
        write(sample(options.data), REFERENCE)
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for row in read():
        ideal, table = modelled(row)
        measured = float(row["us"]) / 1e6
        groups[row["gpu"], row["kind"], row["precision"]].append((measured / ideal, table / measured))
    print(f"{'measured kernels':29} rows  times ideal: median, p10 to p90   table / measured: median, mean error")
    for name, pairs in groups.items():
        ideal, ratio = np.array(pairs).T
        low, middle, high = np.percentile(ideal, (10, 50, 90))
        error = np.abs(ratio - 1).mean()
        print(
            f"{' '.join(name):29} {len(pairs):4} {middle:12.2f} {low:11.2f} {high:5.2f} "
            f"{np.median(ratio):22.2f} {error:14.0%}"
        )


if __name__ == "__main__":
    main()
