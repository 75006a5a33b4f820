"""Writes what a proof of all recipes has shown to where `recipes list` reads it, and says whether it is out of date."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from superpod import collection
from superpod.errors import UserError
from superpod.recipes.facts import proof_level
from superpod.recipes.registry import Model, Recipe, layout_files
from superpod.rehearsal import fingerprint
from superpod.rehearsal.proof import Proof

REHEARSALS = Path(__file__).resolve().parents[1] / "docs" / "rehearsals.json"


def write(proof: Proof, recipes: Sequence[Recipe]) -> Path:
    """Write the evidence of a proof of all of this project's recipes; the old file stands until the new one is whole.

    Raises:
        UserError: collections are in use, whose recipes and hardware are not this project's.
    """
    if folders := collection.folders():
        raise UserError(f"--write keeps the proof without collections, and {folders[0]} is one", "unset it")
    place = proof_level.EVIDENCE
    partial = place.with_name(f".{place.name}")
    try:
        partial.write_text(json.dumps(evidence(proof, recipes), indent=1) + "\n")
        partial.replace(place)
    finally:
        partial.unlink(missing_ok=True)
    return place


def evidence(proof: Proof, recipes: Sequence[Recipe]) -> dict[str, Any]:
    """What the file says of a proof: a line for each model, and groups of exceptions."""
    by_model: dict[str, list[Recipe]] = defaultdict(list)
    for recipe in recipes:
        by_model[recipe.model.name].append(recipe)
    counts = ("recipes", "sizes", "configurations", "models", "built", "layers")
    return {
        "versions": proof.versions,
        "code": code(),
        "generations": proof.generations,
        "counts": {name: getattr(proof, name) for name in counts},
        "models": {
            name: {
                "level": "planned" if own[0].model.broken else "built with TE",
                "layouts": proof_level.layouts_hash(layout_files(name)),
                "resolved": resolved_hash(own, proof.digests),
            }
            for name, own in by_model.items()
            if name not in proof.unproven
        },
        "unproven": proof.unproven,
        "broken": _broken(proof),
        "rehearsed": rehearsed(recipes),
    }


def code() -> str:
    """Hash of the code and data that a proof depends on, beside layouts and versions."""
    return f"{fingerprint.of_resolving()} {fingerprint.of_building()}"


def resolved_hash(recipes: Iterable[Recipe], digests: Mapping[str, str]) -> str:
    """One hash of the resolved configurations of recipes at all sizes that were proven."""
    names = {recipe.name for recipe in recipes}
    lines = sorted(f"{size} {digest}" for size, digest in digests.items() if size.partition(" ")[0] in names)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]


def rehearsed(recipes: Iterable[Recipe]) -> list[str]:
    """The recipes that a rehearsal has trained and passed, and that still have its size."""
    sizes = {recipe.name: recipe.nodes for recipe in recipes}
    results = json.loads(REHEARSALS.read_text()).values() if REHEARSALS.is_file() else ()
    passed = {
        result["recipe"]
        for result in results
        if result["passed"] and result["nodes"] in sizes.get(result["recipe"], ())
    }
    return sorted(passed)


def out_of_date(known: Mapping[str, Any], models: Iterable[Model]) -> list[str]:
    """What has changed since the evidence was written, as lines; builds nothing.

    Compares versions, the code that resolves and builds, and each model's layouts.
    """
    stale = []
    if known.get("versions") != fingerprint.versions():
        stale.append(f"proven with {known.get('versions')}, and {fingerprint.versions()} is installed")
    if known.get("code") != code():
        stale.append("code of planner/, recipes/ or rehearsal/ has changed")
    for model in models:
        group = known.get("models", {}).get(model.name)
        if group is None:
            if model.name not in known.get("unproven", {}):
                stale.append(f"{model.name} was never proven")
        elif group["layouts"] != proof_level.layouts_hash(layout_files(model.name)):
            stale.append(f"{model.name}: its layouts have changed")
    return stale


def _broken(proof: Proof) -> list[dict[str, Any]]:
    """Failures by their reasons, known ones too: why, and the recipes with their sizes."""
    groups: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for failure in (*proof.failures, *proof.known):
        groups[failure.why][failure.recipe].append(failure.nodes)
    return [{"why": why, "recipes": sizes} for why, sizes in groups.items()]
