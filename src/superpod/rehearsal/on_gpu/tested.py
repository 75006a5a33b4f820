"""Saves which sizes of recipes passed their test on a GPU; `collection/facts/proof_level.py` reads the file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from superpod.collection import registry
from superpod.collection.facts import proof_level
from superpod.common.files import write_json
from superpod.rehearsal.on_gpu.shapes import Shape
from superpod.runtime.runs import versions


def find_problem(result: Mapping[str, Any]) -> str:
    """Return why a test failed: its error, a missing step, or a loss that is not a number; "" if it passed."""
    if result.get("error"):
        return result["error"].splitlines()[0][:300]
    losses, steps = result.get("losses", []), result["case"]["steps"]
    if len(losses) < steps:
        return f"only {len(losses)} of {steps} steps were trained"
    if not all(map(math.isfinite, losses)):
        return "the loss is not finite"
    return ""


def save(results: Iterable[Mapping[str, Any]], shapes: Iterable[Shape], gpu: str, path: Path | None = None) -> int:
    """Add the sizes that passed to the file, and remove those that failed; return the number of sizes in it.

    Args:
        results: results of cases.
        shapes: the shapes that were tested, with the sizes for which they stand.
        gpu: the planner's name of the GPU.
        path: the file. Default: `proof_level.TESTED_ON_GPU`.
    """
    path = path or proof_level.TESTED_ON_GPU
    known = proof_level.read_tested(path)
    sizes = {name: dict(nodes) for name, nodes in known.get("sizes", {}).items()}
    represented = {(shape.case.recipe, shape.case.nodes): shape.sizes for shape in shapes}
    for result in results:
        passed = not find_problem(result)
        for name, nodes in represented.get((result["case"]["recipe"], result["case"]["nodes"]), ()):
            if passed:
                sizes.setdefault(name, {})[str(nodes)] = proof_level.facts(registry.find(name), nodes)
            else:
                sizes.get(name, {}).pop(str(nodes), None)
    sizes = {name: nodes for name, nodes in sorted(sizes.items()) if nodes}
    write_json(path, {"gpu": gpu, "versions": versions.versions(), "sizes": sizes})
    return sum(map(len, sizes.values()))
