"""`recipes prove`: plan every declared size and build its real Megatron-Core model, on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.rehearsal.proof import Proof

CACHE = Path("~/.cache/superpod-recipes/proof.json")


def prove(
    words: Annotated[list[str] | None, typer.Argument(help="Only recipes whose names contain all of these.")] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes that build; each needs about 1 GiB.")] = 2,
    cache: Annotated[Path, typer.Option(help="File that remembers which models were built.")] = CACHE,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Plan every declared size of the recipes, and build its real Megatron-Core model without allocating its memory."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from superpod.recipes.registry import recipes
    from superpod.rehearsal.proof import prove as prove_all

    matching = [r for r in recipes().values() if all(w in r.name for w in words or [])]
    if not matching:
        raise UserError(f"no recipe's name contains {' '.join(words or [])}", "`recipes list` shows them all")
    with Progress(
        TextColumn("building"),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("", total=None)
        proof = prove_all(
            matching,
            cache_file=cache.expanduser(),
            workers=workers,
            note=lambda done, total: bar.update(task, completed=done, total=total),
        )
    print(json.dumps(asdict(proof), indent=1) if as_json else _text(proof))
    if proof.failures:
        raise typer.Exit(1)


def _text(proof: Proof) -> str:
    lines = [
        f"{proof.recipes:,} recipes at {proof.sizes:,} sizes: planned, legal and within memory unless named below",
        f"{proof.builds:,} rank models, {proof.unique:,} different ones; {proof.configs:,} different configurations; "
        f"{proof.grids:,} different grids of ranks; {proof.fresh:,} made now, the rest remembered",
        *(f"unproven  {name}: {why}" for name, why in proof.unproven.items()),
        *(f"FAILED  {failure}" for failure in proof.failures),
    ]
    return "\n".join([*lines, "proven" if not proof.failures else f"{len(proof.failures)} failures"])
