"""`recipes list`: list recipes, or models that have recipes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import spellings, tables
from superpod.cli.options.request_options import AsJson

if TYPE_CHECKING:
    from superpod.collection.registry import Recipe


def list_(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="List only recipes whose names contain all WORDS.", callback=spellings.normalize_words),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the recipes whose names contain all WORDS; without WORDS, list the models that have recipes."""
    from superpod.collection.facts.matching import find_recipes

    if not words and not as_json:
        _print_models()
        return
    matching_recipes = find_recipes(words or [])
    if as_json:
        tables.print_json([_facts(r) for r in matching_recipes])
    else:
        _print_recipes(matching_recipes)


def _print_recipes(matching_recipes: list[Recipe]) -> None:
    from superpod.collection.facts import missing_weights, proof_level

    proofs = [proof_level.lookup(r) for r in matching_recipes]
    rows, has_several_layouts = [], False
    for r, proof in zip(matching_recipes, proofs, strict=True):
        sizes = str(r.nodes[0]) if len(r.nodes) == 1 else f"{r.nodes[0]}..{r.nodes[-1]}"
        smallest = r.layout()
        layout = smallest.short()
        if len(set(r.layouts.values())) > 1:
            has_several_layouts = True
            layout += " *"
        rows.append((r.name, sizes, str(r.gpus_per_node), layout, str(r.seq), str(smallest.gbs), proof.summary))
    tables.print_rows(("recipe", "nodes", "GPUs/node", "layout", "seq", "gbs", "proof"), rows)
    print(proof_level.describe_levels(proofs))
    if has_several_layouts:
        print("* layout for the smallest number of nodes; `recipes show NAME --nodes N` shows the others")
    for problem, instead in dict.fromkeys(filter(any, map(missing_weights.explain, matching_recipes))):
        print(f"warning: {problem}\n  next: {instead}")


def _print_models() -> None:
    from superpod.collection.registry import models, recipes

    every = recipes().values()
    rows = []
    for model in models().values():
        model_recipes = [r for r in every if r.model is model]
        tasks = ", ".join(dict.fromkeys(r.task for r in model_recipes))
        long_contexts = dict.fromkeys(f"{r.seq // 1024}k" for r in model_recipes if r.seq > model.seq)
        if long_contexts:
            tasks += f"; pretrain at {' '.join(long_contexts)}"
        rows.append((model.name, f"{len(model_recipes)}", tasks))
    tables.print_folded_table(("model", "recipes", "tasks"), rows, fold=2)
    gpus, precisions = (dict.fromkeys(getattr(r, key) for r in every) for key in ("gpu", "precision"))
    print(f"{len(every):,} recipes, named MODEL_TASK_GPU_PRECISION: {', '.join(gpus)}; {', '.join(precisions)}")
    print(_proof_summary(every))
    print("`recipes list llama3_8b sft h100` lists the recipes whose names contain all of these words")


def _proof_summary(all_recipes: Iterable[Recipe]) -> str:
    """Return a line with the number of recipes per proof level, of all sizes and of their best size."""
    from superpod.collection.facts import proof_level

    proofs = [proof_level.lookup(r) for r in all_recipes]
    levels = Counter(proof.level for proof in proofs)
    counts = [f"{levels[level]:,} {level}" for level in proof_level.LEVELS if levels[level]]
    level_counts = Counter(level for proof in proofs for level in {*proof.higher_levels.values()})
    counts += [f"{level_counts[level]:,} {level} at some size" for level in proof_level.LEVELS if level_counts[level]]
    summary = f"proof: {', '.join(counts)}"
    broken_count = sum(bool(proof.broken) for proof in proofs)
    if broken_count:
        summary += f"; {broken_count:,} known not to start at some size"
    return summary


def _facts(r: Recipe) -> dict[str, object]:
    from superpod.collection.facts import proof_level

    proof = proof_level.lookup(r)
    proof_facts = {name: getattr(proof, name) for name in ("level", "why", "broken", "versions")}
    proof_facts["further"] = proof.higher_levels
    return {
        "name": r.name,
        "model": r.model.name,
        "title": r.model.title,
        "task": r.task,
        "gpu": r.gpu,
        "precision": r.precision,
        "seq": r.seq,
        "gpus_per_node": r.gpus_per_node,
        "proof": proof_facts,
        "layouts": {n: vars(layout) for n, layout in r.layouts.items()},
    }
