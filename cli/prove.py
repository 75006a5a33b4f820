"""`recipes prove`: plan every declared size and build its real models with TE's layers, on this machine."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from superpod.cli import spellings
from superpod.errors import UserError
from superpod.planner.files import unreadable

if TYPE_CHECKING:
    from superpod.recipes.registry import Recipe
    from superpod.rehearsal.proof import Proof

MOST_PLANNED = 32
"""Recipes that are planned for a size that they do not declare: each takes a second or a few."""
CACHE = Path("~/.cache/superpod-recipes/proof.json")
OURS = (b'{"proof"', b'{"resolved"', b'{"built"')
"""How a cache begins (`rehearsal/proof_store.py`), and how those of earlier versions did."""
Words = Annotated[
    list[str] | None,
    typer.Argument(help="Only recipes whose names contain all of these.", callback=spellings.words),
]


def prove(
    words: Words = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes that build; each needs about 1.5 GiB.")] = 2,
    cache: Annotated[Path, typer.Option(help="File that remembers what was resolved and built.")] = CACHE,
    write: Annotated[bool, typer.Option("--write", help="Write the proof to where `recipes list` reads it.")] = False,
    most: Annotated[
        int | None, typer.Option(min=0, help="Configurations to build; the others are resolved only.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", help="Only this size; one that is not declared is planned first.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", help="The size in GPUs, in place of --nodes; 1, 2 or 4 are part of a node.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Plan every declared size of the recipes, and build its real models with Transformer Engine's layers.

    Nothing is allocated and no GPU is needed: shapes only.
    """
    from superpod.recipes import installed
    from superpod.recipes.facts.matching import matching

    recipes = matching(words or [])
    cache = cache.expanduser()
    _refuse_other_file(cache)
    if nodes is not None or gpus is not None:
        if write:
            raise UserError("--write keeps the proof of all declared sizes", "leave --nodes and --gpus out, or --write")
        recipes = _at(recipes, nodes, gpus)
    installed.require("proving recipes")
    if not __debug__:
        raise UserError("Python runs without assert here, and Megatron refuses by it", "unset PYTHONOPTIMIZE, no -O")
    from superpod.rehearsal import proof_store

    if write:
        proof_store.refuse_to_write(recipes)  # before the proof, which takes long
    proof = _proven(recipes, cache, workers, stands=write, most=most)
    if write:
        done = proof_store.write(proof, recipes)
        earlier = f", {done.earlier} as an earlier proof has them" if done.earlier else ""
        changed = f"; {done.changed} are stale: changed and not built" if done.changed else ""
        print(f"wrote {done.proven} sizes to {done.path}{earlier}{changed}", file=sys.stderr)
    print(json.dumps(_for_programs(proof), indent=1) if as_json else _text(proof))
    if proof.failures:
        raise typer.Exit(1)


def _refuse_other_file(cache: Path) -> None:
    """Refuse a file that is no cache, which would be written over. Raises UserError."""
    if not os.path.lexists(cache):
        return
    try:
        with cache.open("rb") as file:
            start = file.read(max(map(len, OURS)))
    except OSError as broken:
        raise unreadable(cache, broken, "a file that `recipes prove` has written, or a new name") from None
    if start and not start.startswith(OURS):
        raise UserError(f"--cache {cache} is another file, which would be written over", "give a new name")


def _proven(recipes: list[Recipe], cache: Path, workers: int, *, stands: bool, most: int | None) -> Proof:
    """The proof, with a bar on a terminal, and a line for every stage elsewhere.

    `stands`: what the written proof still shows is not built anew.
    """
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from superpod.cli.progress import draws
    from superpod.recipes.facts import proof_level
    from superpod.rehearsal.proof import prove as prove_all

    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("planning", total=None)
        stages: list[str] = []

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)
            if not draws(bar.console) and what not in stages:
                stages.append(what)
                bar.console.print(f"{what} {total:,}", highlight=False)

        written = proof_level.read() if stands else None
        return prove_all(recipes, cache_file=cache, workers=workers, note=show, written=written, most=most)


def _at(recipes: list[Recipe], nodes: int | None, gpus: int | None) -> list[Recipe]:
    """The recipes at one size, declared or planned now."""
    from superpod.cli.size_options import say
    from superpod.recipes.sizes.sized import Size, SizedRecipe, nodes_of, sized

    sizes = [Size(nodes)] * len(recipes)
    if gpus is not None:
        sizes = [Size(count, gpus_per_node=part) for count, part in (nodes_of(one, gpus, nodes) for one in recipes)]
    undeclared = [
        recipe
        for recipe, size in zip(recipes, sizes, strict=True)
        if size.gpus_per_node is not None or size.num_nodes not in recipe.layouts
    ]
    if undeclared and len(recipes) > MOST_PLANNED:
        option = f"--nodes {nodes}" if gpus is None else f"--gpus {gpus}"
        raise UserError(
            f"{option} is not a declared size of {len(undeclared)} of {len(recipes)} recipes; each would be planned",
            f"name {MOST_PLANNED} recipes at most: `recipes prove NAME {option}`",
        )
    at_size = [sized(recipe, size) for recipe, size in zip(recipes, sizes, strict=True)]
    say([note for recipe in at_size if isinstance(recipe, SizedRecipe) for note in recipe.notes])
    counts = [size.num_nodes for size in sizes]
    return [replace(recipe, layouts={n: recipe.layout(n)}) for recipe, n in zip(at_size, counts, strict=True)]


def _for_programs(proof: Proof) -> dict[str, Any]:
    """The proof without its thousands of sizes."""
    return {key: value for key, value in asdict(proof).items() if key != "digests"}


def _text(proof: Proof) -> str:
    layers = f" with {proof.layers:,} different TE layers" if not proof.standing else ""  # only a build counts them
    lines = [
        f"{proof.recipes:,} recipes at {proof.sizes:,} sizes: planned, legal and within memory unless named below",
        f"{proof.configurations:,} different configurations, each accepted by Megatron and NeMo; "
        f"{proof.resolved_now:,} sizes resolved now, the others cached",
        f"{proof.models:,} rank models, {proof.built:,} different ones{layers}, for {', '.join(proof.generations)}; "
        f"{proof.built_now:,} built now",
        *_not_built(proof),
        ", ".join(f"{name} {version}" for name, version in proof.versions.items()),
        *(f"unproven  {name}: {why}" for name, why in proof.unproven.items()),
        *_known(proof),
        *_failures(proof),
    ]
    if proof.left and not proof.failures:
        return "\n".join([*lines, "resolved, and proven where built"])
    last = f"proven, but for {len(proof.known)} sizes known not to start" if proof.known else "proven"
    return "\n".join([*lines, last if not proof.failures else f"{len(proof.failures)} failures"])


def _not_built(proof: Proof) -> list[str]:
    """Lines that count the sizes of which nothing was built."""
    lines = []
    if proof.standing:
        lines.append(f"{proof.standing:,} sizes not built: the written proof has what was built from the same inputs")
    if proof.left:
        lines.append(f"{proof.left:,} sizes not built: --most")
    return lines


def _known(proof: Proof) -> list[str]:
    """Lines for every model that is known to be broken: its recipes, why, and the way round."""
    from superpod.recipes.registry import find

    recipes: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for failure in proof.known:
        model = find(failure.recipe).model
        recipes[model.name, model.broken, model.way_round].add(failure.recipe)
    return [
        f"known not to start  {model}: {len(names)} recipes: {why}\n  next: {way}"
        for (model, why, way), names in recipes.items()
    ]


def _failures(proof: Proof) -> list[str]:
    """A line for every reason a recipe has, with the sizes that it holds for."""
    sizes: dict[tuple[str, str], list[int]] = defaultdict(list)
    for failure in proof.failures:
        sizes[failure.recipe, failure.why].append(failure.nodes)
    return [f"FAILED  {recipe} at {', '.join(map(str, nodes))} nodes: {why}" for (recipe, why), nodes in sizes.items()]
