"""`recipes prove`: plan every declared size of recipes, and build its models with Transformer Engine layers."""

from __future__ import annotations

import math
import os
import sys
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import spellings, tables
from superpod.cli.options.request_options import AsJson
from superpod.cli.options.size_options import Gpus, print_notes
from superpod.errors import UserError, counted
from superpod.planner.formats.config_files import unreadable_error

if TYPE_CHECKING:
    from superpod.collection.registry import Recipe
    from superpod.rehearsal.proof.proof import Proof

MAX_PLANNED = 32
"""Maximum number of recipes to plan for an undeclared number of nodes, which takes a few seconds per recipe."""
CACHE = Path("~/.cache/superpod-recipes/proof.json")
CACHE_HEADERS = (b'{"proof"', b'{"resolved"', b'{"built"')
"""First bytes of a cache file (`rehearsal/proof/proof_store.py`) from this and earlier versions."""
Words = Annotated[
    list[str] | None,
    typer.Argument(help="Verify only recipes whose names contain all WORDS.", callback=spellings.normalize_words),
]


def prove(
    words: Words = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Number of processes; each needs about 1.5 GiB.")] = 2,
    cache: Annotated[Path, typer.Option(help="Cache file for resolved and built configurations.")] = CACHE,
    write: Annotated[bool, typer.Option("--write", help="Save the proof levels that `recipes list` prints.")] = False,
    most: Annotated[int | None, typer.Option(min=0, help="Maximum number of configurations to build or train.")] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes",
            help="Verify the recipe on this number of nodes only. If it has no layout for it, the planner chooses one.",
        ),
    ] = None,
    gpus: Gpus = None,
    on_gpu: Annotated[
        Path | None,
        typer.Option(
            "--on-gpu",
            metavar="DIR",
            help="Instead, train each recipe for three steps on one GPU of this machine, with the tensor shapes of one "
            "of its ranks and few layers. Results and logs are written to DIR; calling again continues.",
        ),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=1, help="Start no further recipe after this number of minutes (with --on-gpu).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify that recipes can start, by building the models of every declared size with Transformer Engine layers.

    Models are built on the meta device, without allocating weights; a GPU is required only for --on-gpu.
    """
    from superpod.collection import installed
    from superpod.collection.facts.matching import find_recipes

    recipes = find_recipes(words or [])
    if on_gpu is not None or minutes is not None:
        has_size = nodes is not None or gpus is not None
        _prove_on_gpu(recipes, on_gpu, minutes, workers, most, has_size=has_size, write=write, as_json=as_json)
        return
    cache = cache.expanduser()
    _refuse_other_file(cache)
    if nodes is not None or gpus is not None:
        if write:
            raise UserError(
                "--write saves the proof levels of all declared numbers of nodes",
                "leave out --write, or --nodes and --gpus",
            )
        recipes = _select_size(recipes, nodes, gpus)
    installed.require("verifying recipes")
    if not __debug__:
        raise UserError(
            "assert statements are disabled in this Python, but Megatron rejects configurations with them",
            "unset PYTHONOPTIMIZE, and do not use python -O",
        )
    from superpod.rehearsal.proof import proof_store

    if write:
        proof_store.refuse_to_write(recipes)  # before building, which takes a long time
    proof = _prove(recipes, cache, workers, reuse_saved=write, max_builds=most)
    if write:
        saved_proof = proof_store.write_results(proof, recipes)
        line = f"wrote {counted(saved_proof.proven, 'size')} to {saved_proof.path}"
        if saved_proof.earlier:
            line += f", {saved_proof.earlier:,} of them verified earlier"
        if saved_proof.changed:
            line += f"; {saved_proof.changed:,} are stale: changed but not built"
        print(line, file=sys.stderr)
    _print_proof(proof, as_json=as_json)
    if proof.failures:
        raise typer.Exit(1)


def _prove_on_gpu(
    recipes: list[Recipe],
    folder: Path | None,
    minutes: float | None,
    workers: int,
    max_recipes: int | None,
    *,
    has_size: bool,
    write: bool,
    as_json: bool,
) -> None:
    """Train recipes on the GPU of this machine; exit 1 if one fails. Raises UserError for conflicting options."""
    from superpod.cli.recipes import prove_on_gpu
    from superpod.collection import installed
    from superpod.launch import local
    from superpod.rehearsal.on_gpu import tested
    from superpod.runtime.runs import versions

    if folder is None:
        raise UserError("--minutes requires --on-gpu", "add --on-gpu DIR, or leave out --minutes")
    if has_size:
        raise UserError("--on-gpu tests all declared sizes", "leave out --nodes and --gpus")
    if os.path.lexists(folder) and not folder.is_dir():
        raise UserError(f"--on-gpu {folder} is not a folder", "use a new folder, or that of an earlier test")
    if write:
        tested.refuse_to_write(recipes)
    gpu = prove_on_gpu.find_gpu()
    found_shapes = prove_on_gpu.require_shapes(recipes, gpu)
    installed.require("training on a GPU")
    if not versions.cuda_of_torch():
        raise UserError("--on-gpu needs PyTorch with CUDA, but the installed build is for CPUs", "see docs/install.md")
    local.require_versions({}, on_gpu=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--on-gpu {folder} cannot be created: {error.strerror}", "use another folder") from None
    limit = math.inf if minutes is None else minutes
    results = prove_on_gpu.train_shapes(
        found_shapes, folder, gpu, workers=workers, max_recipes=max_recipes, minutes=limit, write=write
    )
    if as_json:
        tables.print_json(results)
    else:
        print(prove_on_gpu.describe_results(results))
    if not results or any(map(tested.find_problem, results)):
        raise typer.Exit(1)


def _refuse_other_file(cache: Path) -> None:
    """Raise UserError if `cache` exists and is not a cache file of `recipes prove`, which would be overwritten."""
    if not os.path.lexists(cache):
        return
    try:
        with cache.open("rb") as file:
            start = file.read(max(map(len, CACHE_HEADERS)))
    except OSError as broken:
        raise unreadable_error(cache, broken, "a file written by `recipes prove`, or a new file") from None
    if start and not start.startswith(CACHE_HEADERS):
        raise UserError(f"--cache {cache} is not a cache file and would be overwritten", "use a new file name")


def _prove(recipes: list[Recipe], cache: Path, workers: int, *, reuse_saved: bool, max_builds: int | None) -> Proof:
    """Verify recipes and show progress on stderr: a bar on a terminal, otherwise a line per stage.

    With `reuse_saved`, configurations that have not changed since the saved proof are not built.
    """
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from superpod.collection.facts import proof_level
    from superpod.launch.display.progress_bar import can_redraw
    from superpod.rehearsal.proof.proof import prove as prove_all

    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("planning", total=None)
        stages: list[str] = []

        def show(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)
            if not can_redraw(bar.console) and stage not in stages:
                stages.append(stage)
                bar.console.print(f"{stage} {total:,}", highlight=False)

        saved_results = proof_level.read() if reuse_saved else None
        return prove_all(
            recipes, cache_file=cache, workers=workers, note=show, saved_proof=saved_results, max_builds=max_builds
        )


def _select_size(recipes: list[Recipe], nodes: int | None, gpus: int | None) -> list[Recipe]:
    """Return the recipes with only the layout for --nodes or --gpus, which is planned if it is not declared.

    Raises:
        UserError: too many recipes would have to be planned.
    """
    from superpod.collection.sizes.sized import Size, SizedRecipe, adapt, split_gpus

    sizes = [Size(nodes)] * len(recipes)
    if gpus is not None:
        splits = [split_gpus(recipe, gpus, nodes) for recipe in recipes]
        sizes = [Size(num_nodes, gpus_per_node=per_node) for num_nodes, per_node in splits]
    undeclared = [
        recipe
        for recipe, size in zip(recipes, sizes, strict=True)
        if size.gpus_per_node is not None or size.num_nodes not in recipe.layouts
    ]
    if undeclared and len(recipes) > MAX_PLANNED:
        option = f"--nodes {nodes}" if gpus is None else f"--gpus {gpus}"
        raise UserError(
            f"{counted(len(undeclared), 'recipe')} must be planned for {option}, but at most {MAX_PLANNED} are allowed",
            f"select fewer recipes: `recipes prove NAME {option}`",
        )
    at_size = [adapt(recipe, size) for recipe, size in zip(recipes, sizes, strict=True)]
    print_notes([note for recipe in at_size if isinstance(recipe, SizedRecipe) for note in recipe.notes])
    counts = [size.num_nodes for size in sizes]
    return [
        replace(recipe, layouts={count: recipe.layout(count)}) for recipe, count in zip(at_size, counts, strict=True)
    ]


def _print_proof(proof: Proof, *, as_json: bool) -> None:
    """Print the numbers of sizes, configurations and models, the versions, the failures and the conclusion."""
    if as_json:  # without the digests of thousands of sizes
        tables.print_json({key: value for key, value in asdict(proof).items() if key != "digests"})
        return
    layers = ""
    if not proof.standing:  # the layers of configurations that are not built again are not counted
        layers = f" with {proof.layers:,} distinct TE layers"
    lines = [
        f"{proof.recipes:,} recipes at {proof.sizes:,} sizes: planned, legal and within memory unless listed below",
        f"{proof.configurations:,} distinct configurations, accepted by Megatron and NeMo unless listed below; "
        f"{proof.resolved_now:,} sizes resolved now, the others cached",
        f"{proof.models:,} rank models, {proof.built:,} distinct{layers}, for {', '.join(proof.generations)}; "
        f"{proof.built_now:,} built now",
    ]
    if proof.standing:
        lines.append(f"{proof.standing:,} sizes not built: unchanged since the saved proof")
    if proof.left:
        lines.append(f"{proof.left:,} sizes not built, because of --most")
    lines += [
        ", ".join(f"{name} {version}" for name, version in proof.versions.items()),
        *(f"unproven  {name}: {why}" for name, why in proof.unproven.items()),
        *_known_failure_lines(proof),
        *_failure_lines(proof),
    ]
    if proof.failures:
        lines.append(counted(len(proof.failures), "failure"))
    elif proof.left:
        lines.append("all sizes were resolved; those that were built are proven")
    elif proof.known:
        lines.append(f"proven, except {counted(len(proof.known), 'size')} known not to start")
    else:
        lines.append("proven: all sizes can start")
    print("\n".join(lines))


def _known_failure_lines(proof: Proof) -> list[str]:
    """Return a line per model whose recipes are known not to start: number of recipes, reason and workaround."""
    from superpod.collection.registry import find

    recipes: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for failure in proof.known:
        model = find(failure.recipe).model
        recipes[model.name, model.broken, model.workaround].add(failure.recipe)
    return [
        f"known not to start  {model}, {counted(len(names), 'recipe')}: {why}\n  next: {workaround}"
        for (model, why, workaround), names in recipes.items()
    ]


def _failure_lines(proof: Proof) -> list[str]:
    """Return a line per recipe and reason of failure, with the numbers of nodes that fail."""
    sizes: dict[tuple[str, str], list[int]] = defaultdict(list)
    for failure in proof.failures:
        sizes[failure.recipe, failure.why].append(failure.nodes)
    return [f"FAILED  {recipe} at {', '.join(map(str, nodes))} nodes: {why}" for (recipe, why), nodes in sizes.items()]
