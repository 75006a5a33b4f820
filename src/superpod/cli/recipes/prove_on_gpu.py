"""`recipes prove --on-gpu`: train the shapes of recipes for three steps on one GPU of this machine."""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError, counted

if TYPE_CHECKING:
    from superpod.collection.registry import Recipe
    from superpod.rehearsal.on_gpu.shapes import Shapes

CONTEXT_GIB = 1.0
"""Memory of a CUDA context and the libraries' kernels, per process."""
MAX_SHOWN = 5
"""Maximum number of recipes that are listed per error."""


def require_shapes(recipes: Iterable[Recipe], gpu: str) -> Shapes:
    """Return the distinct shapes of the recipes on this GPU. Raises UserError if none of them can be tested."""
    from superpod.rehearsal.on_gpu.shapes import find_shapes

    found_shapes = find_shapes(recipes, gpu)
    if not found_shapes.shapes:
        reasons = {reason for _, _, reason in found_shapes.skipped} or {f"none of them is for GPUs like {gpu}"}
        raise UserError(f"no recipe can be tested on this GPU: {min(reasons)}", f"see `recipes list {gpu}`")
    return found_shapes


def train_shapes(
    all_shapes: Shapes, folder: Path, gpu: str, *, workers: int, max_recipes: int | None, minutes: float, write: bool
) -> list[dict[str, Any]]:
    """Train the shapes that have no result in `folder` yet; return all results.

    Args:
        all_shapes: the result of `require_shapes`.
        folder: for results and logs.
        gpu: the planner's name of the GPU.
        workers: number of shapes to train at a time.
        max_recipes: maximum number of shapes.
        minutes: time after which no further shape is started.
        write: save which sizes passed, for the proof level of recipes.
    """
    from superpod.planner import hardware
    from superpod.rehearsal.on_gpu import tested
    from superpod.rehearsal.on_gpu.first_steps import run_cases

    shapes = all_shapes.shapes[:max_recipes]
    cases = [shape.case for shape in shapes]
    _print_note(all_shapes, len(cases), gpu)
    done = 0

    def note(result: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        problem = tested.find_problem(result)
        outcome = f"FAILED: {problem}" if problem else "passed"
        print(f"[{done}/{len(cases)}] {result['case']['recipe']}: {outcome}", file=sys.stderr, flush=True)

    # A process has its own CUDA context, and the planner's estimate is exceeded at times.
    needed_gib = {shape.case: CONTEXT_GIB + 1.1 * shape.gib for shape in shapes}
    results = run_cases(
        cases,
        folder,
        workers=workers,
        limit_s=60 * minutes,
        needed_gib=needed_gib.__getitem__,
        total_gib=hardware.node(gpu).gpu.hbm_usable_gib,
        note=note,
    )
    if write:
        print(f"{tested.save(results, shapes, gpu)} sizes of recipes are recorded as tested", file=sys.stderr)
    return results


def find_gpu() -> str:
    """Return the planner's name of this machine's first GPU. Raises UserError if there is none, or it is unknown."""
    from superpod.cli.planning.fit import detect_gpus

    return detect_gpus(hint="run it on a node with GPUs")[0]


def _print_note(shapes: Shapes, count: int, gpu: str) -> None:
    sizes = sum(len(shape.sizes) for shape in shapes.shapes)
    note = f"{gpu}: {counted(count, 'shape')} of {len(shapes.shapes)}, which represent {sizes} sizes of recipes"
    if shapes.skipped:
        note += f"; {len(shapes.skipped)} sizes cannot be tested on one GPU"
    print(note, file=sys.stderr)


def describe_results(results: list[dict[str, Any]]) -> str:
    """Return the results as text: the failures by error, and how well the planner predicted the memory."""
    from superpod.rehearsal.on_gpu import tested

    if not results:
        return "no shape was tested"
    failures: dict[str, list[str]] = defaultdict(list)
    differences = []
    for result in results:
        name = result["case"]["recipe"]
        problem = tested.find_problem(result)
        if problem:
            failures[problem].append(name)
        elif result.get("allocated_gib"):
            differences.append(result["predicted"]["allocated_gib"] / result["allocated_gib"][-1] - 1)
    lines = [f"{len(results) - sum(map(len, failures.values()))} of {counted(len(results), 'shape')} passed"]
    if differences:
        median = statistics.median(map(abs, differences))
        lines.append(f"allocated memory: the planner's error is {100 * median:.1f} % in the median")
    for problem, names in sorted(failures.items(), key=lambda item: -len(item[1])):
        more_text = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
        lines.append(f"{len(names)}x {problem}\n    {', '.join(names[:MAX_SHOWN])}{more_text}")
    return "\n".join(lines)
