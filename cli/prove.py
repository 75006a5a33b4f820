"""`recipes prove`: plan every declared size and build its real models with TE's layers, on this machine."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from superpod.rehearsal.proof import Proof

CACHE = Path("~/.cache/superpod-recipes/proof.json")


def prove(
    words: Annotated[list[str] | None, typer.Argument(help="Only recipes whose names contain all of these.")] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes that build; each needs about 1.5 GiB.")] = 2,
    cache: Annotated[Path, typer.Option(help="File that remembers what was resolved and built.")] = CACHE,
    write: Annotated[
        bool, typer.Option("--write", help="Write the proof of whole models to where `recipes list` reads it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Plan every declared size of the recipes, and build its real models with Transformer Engine's layers.

    Nothing is allocated and no GPU is needed: shapes only.
    """
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from superpod.recipes.facts.matching import matching
    from superpod.rehearsal.proof import prove as prove_all

    recipes = matching(words or [])
    if write:
        from superpod.rehearsal import evidence

        evidence.whole_models(recipes)  # refuses before the proof, which takes long
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("planning", total=None)
        proof = prove_all(
            recipes,
            cache_file=cache.expanduser(),
            workers=workers,
            note=lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
        )
    if write:
        from superpod.rehearsal import evidence

        done = evidence.write(proof, recipes)
        dropped = f"; dropped {done.dropped} of other code, versions or layouts" if done.dropped else ""
        print(f"wrote {done.proven} models to {done.path}, and kept {done.kept}{dropped}", file=sys.stderr)
    print(json.dumps({k: v for k, v in asdict(proof).items() if k != "digests"}, indent=1) if as_json else _text(proof))
    if proof.failures:
        raise typer.Exit(1)


def _text(proof: Proof) -> str:
    lines = [
        f"{proof.recipes:,} recipes at {proof.sizes:,} sizes: planned, legal and within memory unless named below",
        f"{proof.configurations:,} different configurations, each accepted by Megatron and NeMo; "
        f"{proof.resolved_now:,} sizes resolved now, the rest remembered",
        f"{proof.models:,} rank models, {proof.built:,} different ones with {proof.layers:,} different TE layers, "
        f"for {', '.join(proof.generations)}; {proof.built_now:,} built now",
        ", ".join(f"{name} {version}" for name, version in proof.versions.items()),
        *(f"unproven  {name}: {why}" for name, why in proof.unproven.items()),
        *_known(proof),
        *_failures(proof),
    ]
    last = f"proven, but for {len(proof.known)} sizes known not to start" if proof.known else "proven"
    return "\n".join([*lines, last if not proof.failures else f"{len(proof.failures)} failures"])


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
