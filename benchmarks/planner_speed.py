"""How fast the planner is, against its targets, in CPU time. Prints a table; exit 1 when a target is missed.

CPU time of all threads and processes, because a busy machine changes it less than the time on the clock. Each command
is a whole process, with Python's compiled files in place, as at its second start. The best of several counts.

python benchmarks/planner_speed.py
"""

from __future__ import annotations

import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

PLAN = ["plan", "llama31_405b", "--gpu=h100", "--gpus=16384", "--seq=8192", "--gbs=2048", "--json", "--top=1"]
PLAN_S, CANDIDATES = 0.6, 100_000
SEARCH = """
import time
from superpod.cli.options.plan_options import PlanOptions
from superpod.planner.search import search

job = PlanOptions("deepseek_v3", gpu="h100", gpus=2048, seq=4096, gbs=8192).job_to_search()
start = time.process_time()
result = search(job)
result.ranked
print(time.process_time() - start, len(result))
"""
SEARCH_S, SEARCHED = 1.2, 600_000
ROWS, ROWS_PER_MINUTE, CORES = 100_000, 1_200_000, 2  # a million on the clock, with what runs on one core
REPEATS = 5


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        plan_s, candidates = plan(environment)
        search_s, searched = search(environment)
        rate = predict(environment)
    lines = [
        ("plan of 405B on 16,384 H100, whole process", f"{plan_s:.2f} s", f"< {PLAN_S:g} s", plan_s < PLAN_S),
        ("legal layouts it costs", f"{candidates:,}", f">= {CANDIDATES:,}", candidates >= CANDIDATES),
        ("search of DeepSeek-V3 on 2,048 H100", f"{search_s:.2f} s", f"< {SEARCH_S:g} s", search_s < SEARCH_S),
        ("legal layouts it costs", f"{searched:,}", f">= {SEARCHED:,}", searched >= SEARCHED),
        (
            f"predict, {ROWS:,} rows, whole process, {CORES} cores",
            f"{rate:,.0f} rows/min",
            f">= {ROWS_PER_MINUTE:,}",
            rate >= ROWS_PER_MINUTE,
        ),
    ]
    for what, figure, target, met in lines:
        print(f"{what:<48} {figure:>18}  target {target:<16} {'met' if met else 'MISSED'}")
    return 0 if all(met for *_, met in lines) else 1


def run(environment: Mapping[str, str], *words: str) -> tuple[float, str]:
    """CPU seconds of a Python process and its children, and what it prints."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, *words]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, printed


def plan(environment: Mapping[str, str]) -> tuple[float, int]:
    """CPU seconds of a whole process, and how many layouts were costed."""
    runs = [run(environment, "-m", "superpod.cli", *PLAN) for _ in range(REPEATS)]
    return min(spent for spent, _ in runs), json.loads(runs[0][1])["candidates"]


def search(environment: Mapping[str, str]) -> tuple[float, int]:
    """CPU seconds of a search and the ranking of its layouts, and how many layouts were costed."""
    runs = [run(environment, "-c", SEARCH)[1].split() for _ in range(REPEATS)]
    return min(float(spent) for spent, _ in runs), int(runs[0][1])


def predict(environment: Mapping[str, str]) -> float:
    """Rows per minute of a table of layouts of several models, all different, on cores with nothing else to do."""
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
        spent, _ = run(environment, "-m", "superpod.cli", "predict", "--from", str(source), "--out", str(out))
        return ROWS * CORES / spent * 60


if __name__ == "__main__":
    sys.exit(main())
