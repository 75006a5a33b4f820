"""Writes what proofs of whole models have shown to where `recipes list` reads it, and says what is stale."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from superpod import collection
from superpod.errors import UserError
from superpod.recipes import registry
from superpod.recipes.facts import proof_level
from superpod.recipes.registry import Model, Recipe, layout_files
from superpod.rehearsal import fingerprint, standing
from superpod.rehearsal.proof import Proof

REHEARSALS = Path(__file__).resolve().parents[1] / "docs" / "rehearsals.json"


@dataclass(frozen=True)
class Written:
    """What has become of the file."""

    path: Path
    proven: int
    """models that this proof has written"""
    kept: int
    """models that the file keeps from earlier proofs"""
    dropped: int
    """models that it had, proven with other code, versions or layouts"""


def whole_models(recipes: Iterable[Recipe]) -> dict[str, list[Recipe]]:
    """The models all of whose recipes are among these, with them: of no other model can a proof say how far it is.

    Raises:
        UserError: there is none; or collections are in use, whose recipes and hardware are not this project's.
    """
    if folders := collection.folders():
        raise UserError(f"--write keeps the proof without collections, and {folders[0]} is one", "unset it")
    by_model: dict[str, list[Recipe]] = defaultdict(list)
    for recipe in recipes:
        by_model[recipe.model.name].append(recipe)
    sizes = Counter(recipe.model.name for recipe in registry.recipes().values())
    whole = {name: own for name, own in by_model.items() if len(own) == sizes[name]}
    if not whole:
        names = ", ".join(by_model)
        raise UserError(
            f"--write keeps the proof of whole models, and these are only some of the recipes of {names}",
            f"recipes prove --write {next(iter(by_model), '')}",
        )
    return whole


def refuse_to_drop(recipes: Iterable[Recipe]) -> None:
    """Refuse to write of some models what would drop the proof of others: it was made with other code or libraries.

    Raises:
        UserError: with how many there are.
    """
    old = proof_level.read()
    others = _names(old) - {recipe.model.name for recipe in recipes}
    if others and (old.get("versions"), old.get("code")) != (fingerprint.versions(), code()):
        raise UserError(
            f"{proof_level.EVIDENCE.name} has {len(others)} more models, proven with other code or libraries, and this "
            "would drop them",
            "prove them all: `recipes prove --write` builds only those that the change concerns",
        )


def write(proof: Proof, recipes: Sequence[Recipe]) -> Written:
    """Write the evidence of a proof, and keep what the file says of models that the proof was not of.

    Kept is only what was proven with the same code, versions and layouts. The old file stands until the new one is
    whole.

    Raises:
        UserError: as `whole_models`.
    """
    new, old = evidence(proof, recipes), proof_level.read()
    merged, kept = _merged(new, old)
    mine = {*new["models"], *new["unproven"]}
    place = proof_level.EVIDENCE
    partial = place.with_name(f".{place.name}")
    try:
        partial.write_text(json.dumps(merged, indent=1) + "\n")
        partial.replace(place)
    finally:
        partial.unlink(missing_ok=True)
    return Written(place, len(mine), len(kept), len(_names(old) - mine - kept))


def evidence(proof: Proof, recipes: Iterable[Recipe]) -> dict[str, Any]:
    """What the file says of a proof: a line for each whole model, and groups of exceptions."""
    whole = whole_models(recipes)
    return {
        "versions": proof.versions,
        "code": code(),
        "models": {
            name: {
                "level": "planned" if own[0].model.broken else "built with TE",
                "recipes": len(own),
                "sizes": sum(len(recipe.nodes) for recipe in own),
                "layouts": proof_level.layouts_hash(layout_files(name)),
                "resolved": standing.of_sizes(own, proof.digests),
                "expected": standing.of_sizes(own, proof.expected),
            }
            for name, own in whole.items()
            if name not in proof.unproven
        },
        "unproven": {name: why for name, why in proof.unproven.items() if name in whole},
        "broken": _broken(proof, {recipe.name for own in whole.values() for recipe in own}),
        "rehearsed": rehearsed(recipe for own in whole.values() for recipe in own),
    }


def _merged(new: dict[str, Any], old: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """`new` with what `old` says of other models, where that still holds; and which models those are."""
    if any(old.get(name) != new[name] for name in ("versions", "code")):
        return new, set()
    known = registry.models()
    current = {
        name
        for name in _names(old) - _names(new)
        if name in known and name not in {line.partition(":")[0] for line in stale(old)}
    }
    names = {recipe.name for recipe in registry.recipes().values() if recipe.model.name in current}
    groups: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for group in old["broken"]:
        groups[group["why"]] |= {name: sizes for name, sizes in group["recipes"].items() if name in names}
    for group in new["broken"]:
        groups[group["why"]] |= group["recipes"]
    both = {
        key: {name: value for name, value in old[key].items() if name in current} | new[key]
        for key in ("models", "unproven")
    }
    both["rehearsed"] = rehearsed(recipe for recipe in registry.recipes().values() if recipe.model.name in _names(both))
    broken = [{"why": why, "recipes": sizes} for why, sizes in groups.items() if sizes]
    return new | both | {"broken": broken}, current


def _names(known: Mapping[str, Any]) -> set[str]:
    """The models of which evidence says something."""
    return {*known.get("models", ()), *known.get("unproven", ())}


def code() -> str:
    """Hash of the code and data that a proof depends on, beside layouts and versions."""
    return f"{fingerprint.of_resolving()} {standing.code()}"


def rehearsed(recipes: Iterable[Recipe]) -> dict[str, list[int]]:
    """Recipe -> sizes at which it was rehearsed in the topology that it has there today, and no rehearsal failed."""
    ours = {recipe.name: recipe for recipe in recipes}
    results = json.loads(REHEARSALS.read_text()).values() if REHEARSALS.is_file() else ()
    verdicts: dict[str, dict[int, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        recipe, nodes = ours.get(result["recipe"]), result["nodes"]
        if recipe and nodes in recipe.nodes:
            same = _degrees(result.get("topology", "")) == _todays_degrees(recipe, nodes)
            if same or not result["passed"]:
                verdicts[recipe.name][nodes].append(result["passed"])
    passed = {name: sorted(n for n, runs in sizes.items() if all(runs)) for name, sizes in sorted(verdicts.items())}
    return {name: sizes for name, sizes in passed.items() if sizes}


def _degrees(topology: str) -> set[str]:
    """{"TP8", "SP", "DP4"} of `TP2 SP DP2, folded: TP 8 -> 2, DP 4 -> 2`: the degrees before they were folded."""
    short, _, folded = topology.partition(", ")
    degrees = dict(re.findall(r"([A-Z]+)(\d*)", short))
    degrees.update(re.findall(r"([A-Z]+) (\d+) -> ", folded))
    return {f"{name}{size}" for name, size in degrees.items()}


def _todays_degrees(recipe: Recipe, nodes: int) -> set[str]:
    layout = recipe.layout(nodes)
    dp = layout.dp(nodes * recipe.gpus_per_node)
    short = layout.short() if layout.model_parallel * layout.ep > 1 else ""
    return _degrees(f"{short} DP{dp}" if dp > 1 else short)


def stale(known: Mapping[str, Any]) -> list[str]:
    """What has changed since the evidence was written, as lines; builds nothing. No evidence is not stale.

    Compares versions, the code that resolves and builds, each model's layouts, and the rehearsals.
    """
    if not known:
        return []
    lines = []
    if known.get("versions") != fingerprint.versions():
        lines.append(f"proven with {known.get('versions')}, and {fingerprint.versions()} is installed")
    if known.get("code") != code():
        lines.append("code of planner/, recipes/ or rehearsal/ has changed")
    for name in sorted(_names(known)):
        if name not in registry.models():
            lines.append(f"{name}: there is no such model")
        elif (group := known["models"].get(name)) and group["layouts"] != proof_level.layouts_hash(layout_files(name)):
            lines.append(f"{name}: its layouts have changed")
    own = [recipe for recipe in registry.recipes().values() if recipe.model.name in _names(known)]
    if known.get("rehearsed", {}) != rehearsed(own):
        lines.append("docs/rehearsals.json has changed")
    return lines


def never_proven(known: Mapping[str, Any], models: Iterable[Model]) -> list[str]:
    """The models of which the evidence says nothing."""
    return [model.name for model in models if model.name not in _names(known)]


def _broken(proof: Proof, names: Container[str]) -> list[dict[str, Any]]:
    """Failures of these recipes by their reasons, known ones too: why, and the recipes with their sizes."""
    groups: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for failure in (*proof.failures, *proof.known):
        if failure.recipe in names:
            groups[failure.why][failure.recipe].append(failure.nodes)
    return [{"why": why, "recipes": sizes} for why, sizes in groups.items()]
