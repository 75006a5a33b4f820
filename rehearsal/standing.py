"""What a written proof still shows: the models whose builds would come out as they did.

A build follows from its resolved configuration and from the code and libraries that build; its verdict from the
parameters that the planner expects, too. Where all of these are as the proof has written them, nothing is built anew.
So a change of the planner costs the minutes in which every size is resolved, in a clone without a cache as well.
"""

from __future__ import annotations

import ast
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from superpod.recipes.registry import Recipe
from superpod.rehearsal import fingerprint, parameter_counts

Size = tuple[str, int]
"""A recipe's name and a number of nodes."""


JUDGES = ("parameter_counts.py", "proof.py", "proof_pool.py")
"""Files of this folder that compare a build with what is expected of it, and say what has failed."""


def code() -> str:
    """Hashes of the code that builds, and of that which judges."""
    folder = Path(parameter_counts.__file__).parent
    trees = [ast.dump(ast.parse((folder / name).read_text(encoding="utf-8"))) for name in JUDGES]
    judges = hashlib.sha256("\n".join(trees).encode()).hexdigest()[:24]
    return f"{fingerprint.of_building()} {judges}"


def of_sizes(recipes: Iterable[Recipe], facts: Mapping[Size, object]) -> str:
    """One hash of what is known of the sizes of recipes; a size of which nothing is known is absent."""
    names = {recipe.name for recipe in recipes}
    lines = sorted(f"{name} {nodes} {fact}" for (name, nodes), fact in facts.items() if name in names)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]


def models(
    written: Mapping[str, Any],
    recipes: Iterable[Recipe],
    digests: Mapping[Size, str],
    expected: Mapping[Size, object],
) -> set[str]:
    """The models of which a written proof still holds, at every size.

    Args:
        written: what `recipes/facts/proven.json` says.
        recipes: those that are proven now.
        digests: of the resolved configuration of each size that has no fault so far.
        expected: what a build of the same sizes must come to, and on how many GPUs a node.
    """
    if written.get("versions") != fingerprint.versions() or written.get("code", "").partition(" ")[2] != code():
        return set()
    by_model: dict[str, list[Recipe]] = defaultdict(list)
    for recipe in recipes:
        by_model[recipe.model.name].append(recipe)
    standing: set[str] = set()
    for name, own in by_model.items():
        known = {} if name in written["unproven"] else written["models"].get(name, {})
        whole = not own[0].model.broken and all((recipe.name, n) in digests for recipe in own for n in recipe.nodes)
        if whole and (known.get("resolved"), known.get("expected")) == (
            of_sizes(own, digests),
            of_sizes(own, expected),
        ):
            standing.add(name)
    return standing
