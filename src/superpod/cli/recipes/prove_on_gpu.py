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
"""Memory of a CUDA context and the kernels of libraries, per process."""
MAX_SHOWN = 5
"""Maximum number of recipes to list per error."""


def require_shapes(recipes: Iterable[Recipe], gpu: str) -> Shapes:
    """Return the distinct shapes to train for recipes on a GPU type.

    Raises:
        UserError: no recipe can be tested on this GPU.
    """
    from superpod.rehearsal.on_gpu.shapes import find_shapes

    found_shapes = find_shapes(recipes, gpu)
    if not found_shapes.shapes:
        reasons = {reason for _, _, reason in found_shapes.skipped} or {f"none is for {gpu} or a similar GPU"}
        raise UserError(f"no recipe can be tested on this GPU: {min(reasons)}", f"see `recipes list {gpu}`")
    return found_shapes


def train_shapes(
    all_shapes: Shapes, folder: Path, gpu: str, *, workers: int, max_recipes: int | None, minutes: float, write: bool
) -> list[dict[str, Any]]:
    """Train the shapes that have no result in `folder` yet, and return the results of all shapes.

    Args:
        all_shapes: the result of `require_shapes`.
        folder: folder for results and logs.
        gpu: GPU type.
        workers: number of shapes to train concurrently.
        max_recipes: maximum number of shapes; None = all.
        minutes: time after which no further shape is started.
        write: save the sizes that passed, for the proof level of recipes.
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

    # Each process has its own CUDA context, and some use more memory than the planner predicts.
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
        print(f"recorded {counted(tested.save(results, shapes, gpu), 'size')} of recipes as tested", file=sys.stderr)
    return results


def find_gpu() -> str:
    """Return the type of this machine's first GPU. Raises UserError if there is none, or its type is unknown."""
    from superpod.cli.planning.fit import detect_gpus

    return detect_gpus(hint="run the command on a node with GPUs")[0]


def _print_note(shapes: Shapes, count: int, gpu: str) -> None:
    sizes = sum(len(shape.sizes) for shape in shapes.shapes)
    note = f"{gpu}: training {count} of {counted(len(shapes.shapes), 'shape')}, which cover {counted(sizes, 'size')}"
    if shapes.skipped:
        note += f"; {counted(len(shapes.skipped), 'size')} cannot be tested on one GPU"
    print(note, file=sys.stderr)


def describe_results(results: list[dict[str, Any]]) -> str:
    """Return the results as text: the error of the predicted memory, and the failed recipes by error message."""
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
        lines.append(f"allocated memory: the median error of the planner is {100 * median:.1f} %")
    for problem, names in sorted(failures.items(), key=lambda item: -len(item[1])):
        more_text = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
        lines.append(f"{len(names)}x {problem}\n    {', '.join(names[:MAX_SHOWN])}{more_text}")
    return "\n".join(lines)
