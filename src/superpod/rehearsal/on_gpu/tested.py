"""Saves the sizes of recipes that passed their test on a GPU; `collection/facts/proof_level.py` reads the file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from superpod.collection import registry
from superpod.collection.facts import proof_level
from superpod.common.json_files import write_json
from superpod.errors import UserError
from superpod.rehearsal.on_gpu.shapes import Shape


def find_problem(result: Mapping[str, Any]) -> str:
    """Return the reason for the failure of a test: its error, a missing step, or a non-finite loss; "" if it passed."""
    if result.get("error"):
        return result["error"].splitlines()[0][:300]
    losses, steps = result.get("losses", []), result["case"]["steps"]
    if len(losses) < steps:
        return f"only {len(losses)} of {steps} steps were trained"
    if None in losses:  # JSON has no NaN and no infinity
        return "the loss is not finite"
    return ""


def refuse_to_write(recipes: Iterable[registry.Recipe]) -> None:
    """Raise UserError if a recipe is from a user's collection, because the results file is part of this project."""
    for recipe in recipes:
        if recipe.source.parent != registry.LAYOUTS:
            raise UserError(
                f"--write saves results of this project's recipes, but {recipe.name} is from {recipe.source}",
                "omit --write",
            )


def save(results: Iterable[Mapping[str, Any]], shapes: Iterable[Shape], gpu: str, path: Path | None = None) -> int:
    """Add the sizes that passed to the results file, and remove those that failed; return its number of sizes.

    Args:
        results: results of `first_steps.run_cases`.
        shapes: the shapes that were tested, with all sizes that they represent.
        gpu: the planner's name of the GPU.
        path: the file. Default: `proof_level.TESTED_ON_GPU`.
    """
    path = path or proof_level.TESTED_ON_GPU
    groups = proof_level.read_tested(path)
    represented = {(shape.case.recipe, shape.case.nodes): shape.sizes for shape in shapes}
    for result in results:
        case, versions = result["case"], result["versions"]
        is_passed = not find_problem(result)
        for name, nodes in represented.get((case["recipe"], case["nodes"]), ()):
            for group in groups:
                group["sizes"].get(name, {}).pop(str(nodes), None)
            if is_passed:
                sizes = _find_group(groups, gpu, versions)["sizes"]
                sizes.setdefault(name, {})[str(nodes)] = proof_level.facts(registry.find(name), nodes)
    for group in groups:
        group["sizes"] = {name: nodes for name, nodes in group["sizes"].items() if nodes}
    groups = [group for group in groups if group["sizes"]]
    write_json(path, {"tests": groups})
    return sum(len(nodes) for group in groups for nodes in group["sizes"].values())


def _find_group(groups: list[dict[str, Any]], gpu: str, versions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the group of sizes that were tested on this GPU with these versions; add an empty one if there is none."""
    for group in groups:
        if (group["gpu"], group["versions"]) == (gpu, versions):
            return group
    groups.append({"gpu": gpu, "versions": dict(versions), "sizes": {}})
    return groups[-1]
