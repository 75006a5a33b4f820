"""Measure training steps on this machine's GPU and compare them with the planner: `python -m benchmarks.gpu_steps DIR`.

Each case trains alone for a few steps, the most informative first; a second call with the same DIR continues. The same
shapes are trained by the recipe, by NeMo's own recipe, and by a bare Megatron-Core loop. Without a GPU, the exit code
is 2.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from superpod.cli.recipes.prove_on_gpu import find_gpu
from superpod.errors import UserError
from superpod.planner import hardware
from superpod.rehearsal.on_gpu import tested
from superpod.rehearsal.on_gpu.case import Case
from superpod.rehearsal.on_gpu.first_steps import run_cases

STEPS, WARMUP = 8, 3
MICRO_BATCHES = 4
MEMORY_SHARE = 0.85
"""Fraction of the GPU's memory that the layers of a case may use, according to the planner."""


def list_cases(gpu: str) -> list[Case]:
    """Return the cases, the most informative first."""
    limit = MEMORY_SHARE * hardware.node(gpu).gpu.hbm_usable_gib
    common: dict[str, Any] = {
        "micro_batches": MICRO_BATCHES, "steps": STEPS, "limit_gib": limit, "exclusive": True
    }  # fmt: skip
    one_rank = ("trainer.strategy.context_parallel_size=1",)
    full = tuple(f"model.config.recompute_{field}" for field in ("granularity=full", "method=uniform", "num_layers=1"))
    return [
        Case("llama32_1b_pretrain_h100_bf16", profile=True, **common),
        Case("llama32_1b_pretrain_h100_bf16", bare=True, **common),
        Case("nemo:llama32_1b", **common),
        *(Case(f"llama3_8b_pretrain_h100_{kind}", profile=True, **common) for kind in ("bf16", "fp8ds", "fp8cs")),
        Case("llama3_8b_pretrain_h100_bf16", bare=True, **common),
        Case("nemo:llama3_8b", overrides=one_rank, **common),
        Case("qwen3_4b_pretrain_h100_bf16", **common),
        Case("qwen3_30b_a3b_pretrain_h100_bf16", profile=True, **common),
        Case("llama3_8b_lora_h100_bf16", profile=True, **common),
        Case("llama32_1b_pretrain_h100_bf16", overrides=("data.micro_batch_size=4",), **common),
        Case("llama32_1b_pretrain_h100_bf16", overrides=full, **common),
    ]


def main(arguments: list[str]) -> int:
    """Measure the cases and print a table; return the exit code."""
    if len(arguments) != 1:
        print("usage: python -m benchmarks.gpu_steps DIR", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    try:
        gpu = find_gpu()
    except UserError as error:
        print(f"error: {error}\n  next: {error.hint}", file=sys.stderr)
        return 2
    # Two processes: while one trains, the other builds its recipe.
    results = run_cases(list_cases(gpu), folder, workers=2)
    print(f"| case on {gpu} | layers | step s | planned | error | MFU | allocated GiB | planned | error |")
    print("|---|---|---|---|---|---|---|---|---|")
    for result in results:
        print(describe(result))
    return 0


def describe(result: dict[str, Any]) -> str:
    """Format the result of a case as a row of the table."""
    case = result["case"]
    name = " ".join([case["recipe"], *case["overrides"], *(["bare loop"] if case["bare"] else [])])
    problem = tested.find_problem(result)
    if problem:
        return f"| {name} | failed: {problem} | | | | | | | |"
    last = -1 if case["profile"] else None  # profiling slows the last step down
    seconds = statistics.median(result["seconds"][WARMUP:last])
    planned = result["predicted"]
    allocated = result["allocated_gib"][-1]
    layers = result["folded"].get("layers", ["", "all"])[1]
    cells = (
        name,
        layers,
        f"{seconds:.3f}",
        f"{planned['step_time_s']:.3f}",
        f"{100 * (planned['step_time_s'] / seconds - 1):+.1f} %",
        f"{100 * planned['mfu'] * planned['step_time_s'] / seconds:.1f} %",
        f"{allocated:.2f}",
        f"{planned['allocated_gib']:.2f}",
        f"{100 * (planned['allocated_gib'] / allocated - 1):+.1f} %",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
