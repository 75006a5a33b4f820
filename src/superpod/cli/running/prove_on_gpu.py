"""`recipes prove --on-gpu`: train the shapes of recipes for three steps on one GPU of this machine."""

from __future__ import annotations

import shutil
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
SHOWN = 5
"""Maximum number of recipes that are listed per error."""


def prove_on_gpu(
    recipes: Iterable[Recipe],
    folder: Path,
    gpu: str,
    *,
    workers: int,
    most: int | None,
    minutes: float,
    write: bool = False,
) -> list[dict[str, Any]]:
    """Train the distinct shapes of the recipes that have no result in `folder` yet; return all results.

    Args:
        recipes: the recipes; those for other GPUs than this machine's are left out.
        folder: for results and logs.
        gpu: the planner's name of the GPU.
        workers: number of shapes to train at a time.
        most: maximum number of shapes.
        minutes: time after which no further shape is started.
        write: save which sizes passed, for the proof level of recipes.

    Raises:
        UserError: none of the recipes can be tested on the GPU.
    """
    from superpod.planner import hardware
    from superpod.rehearsal.on_gpu import tested
    from superpod.rehearsal.on_gpu.first_steps import run_cases
    from superpod.rehearsal.on_gpu.shapes import find_shapes

    found = find_shapes(recipes, gpu)
    if not found.shapes:
        reasons = {reason for _, _, reason in found.skipped} or {f"none of them is for GPUs like {gpu}"}
        raise UserError(f"no recipe can be tested on this GPU: {min(reasons)}", f"see `recipes list {gpu}`")
    shapes = found.shapes[:most]
    _print_note(found, len(shapes))
    done = 0

    def note(result: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        outcome = f"FAILED: {result['error'][:200]}" if result.get("error") else "passed"
        print(f"[{done}/{len(shapes)}] {result['case']['recipe']}: {outcome}", file=sys.stderr, flush=True)

    # A process has its own CUDA context, and the planner's estimate is exceeded at times.
    needed_gib = {shape.case: CONTEXT_GIB + 1.1 * shape.gib for shape in shapes}
    results = run_cases(
        needed_gib,
        folder,
        workers=workers,
        limit_s=60 * minutes,
        needed_gib=needed_gib.__getitem__,
        total_gib=hardware.node(gpu).gpu.hbm_usable_gib,
        note=note,
    )
    chosen = {(shape.case.recipe, shape.case.nodes) for shape in shapes}
    results = [result for result in results if (result["case"]["recipe"], result["case"]["nodes"]) in chosen]
    if write:
        print(f"{tested.save(results, shapes, gpu)} sizes of recipes are recorded as tested", file=sys.stderr)
    return results


def find_gpu() -> str:
    """Return the planner's name of this machine's first GPU. Raises UserError if there is none, or it is unknown."""
    from superpod.planner import hardware
    from superpod.runtime.processes.command import output_of

    if shutil.which("nvidia-smi") is None:
        raise UserError("--on-gpu needs an NVIDIA GPU, but there is no nvidia-smi", "run it on a node with GPUs")
    names = output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    if not names or not names.strip():
        raise UserError("--on-gpu needs an NVIDIA GPU, but nvidia-smi lists none", "run it on a node with GPUs")
    name = names.splitlines()[0].strip()
    known = hardware.match_gpu(name)
    if not known:
        raise UserError(f"the planner does not know the GPU {name!r}", "add it to a hardware file: docs/extending.md")
    return known


def _print_note(found: Shapes, chosen: int) -> None:
    sizes = sum(len(shape.sizes) for shape in found.shapes)
    note = f"{counted(chosen, 'shape')} of {len(found.shapes)}, which stand for {sizes} sizes of recipes"
    if found.skipped:
        note += f"; {len(found.skipped)} sizes cannot be tested on one GPU"
    print(note, file=sys.stderr)


def describe_results(results: list[dict[str, Any]]) -> str:
    """Return the results as text: the failures by error, and how well the planner predicted the memory."""
    from superpod.rehearsal.on_gpu import tested

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
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        lines.append(f"{len(names)}x {problem}\n    {', '.join(names[:SHOWN])}{more}")
    return "\n".join(lines)
