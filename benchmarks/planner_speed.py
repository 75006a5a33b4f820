"""Measure the speed of the planner, and print a table with the targets of docs/planner.md; exit 1 if one is missed.

python benchmarks/planner_speed.py
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PLAN = ["plan", "llama31_405b", "--gpu=h100", "--gpus=16384", "--seq=8192", "--gbs=2048", "--json", "--top=1"]
PLAN_S, CANDIDATES = 2.0, 100_000
ROWS, ROWS_PER_MINUTE = 100_000, 1_000_000
REPEATS = 5


def main() -> int:
    plan_s, candidates = plan()
    rate = predict()
    lines = [
        ("plan of 405B on 16,384 H100, whole process", f"{plan_s:.2f} s", f"< {PLAN_S:g} s", plan_s < PLAN_S),
        ("legal layouts it costs", f"{candidates:,}", f">= {CANDIDATES:,}", candidates >= CANDIDATES),
        (f"predict, {ROWS:,} rows", f"{rate:,.0f} rows/min", f">= {ROWS_PER_MINUTE:,}", rate >= ROWS_PER_MINUTE),
    ]
    for what, figure, target, met in lines:
        print(f"{what:<45} {figure:>18}  target {target:<16} {'met' if met else 'MISSED'}")
    return 0 if all(met for *_, met in lines) else 1


def recipes(*words: str) -> str:
    command = [sys.executable, "-m", "superpod.cli", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def plan() -> tuple[float, int]:
    """Return (seconds of the fastest of several processes, number of layouts that the search predicted)."""
    best, answer = float("inf"), ""
    for _ in range(REPEATS):
        start = time.perf_counter()
        answer = recipes(*PLAN)
        best = min(best, time.perf_counter() - start)
    return best, json.loads(answer)["candidates"]


def predict() -> float:
    """Return the rows per minute of `recipes predict` on a table of distinct layouts of several models."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "rows.csv"), Path(folder, "out.csv")
        models = ("llama3_8b", "llama3_70b", "llama31_405b", "qwen3_30b_a3b", "deepseek_v3", "gpt3_175b")
        keys = ("id", "model", "gpu", "gpus", "precision", "seq", "gbs", "mbs", "tp", "pp", "cp", "recompute")
        with source.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(keys)
            for i in range(ROWS):
                degree = 2 ** (i % 4), 2 ** (i // 4 % 4), 2 ** (i // 16 % 3)
                batch = (2 ** (i // 48 % 3), 256 * (1 + i // 288))  # all rows are distinct
                precision = ("bf16", "fp8")[i // 144 % 2]
                row = (models[i % 6], "h100", 256, precision, 4096, batch[1], batch[0], *degree, ("", "full")[i % 2])
                writer.writerow((i, *row))
        start = time.perf_counter()
        recipes("predict", "--from", str(source), "--out", str(out))
        return ROWS / (time.perf_counter() - start) * 60


if __name__ == "__main__":
    sys.exit(main())
