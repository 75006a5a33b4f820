"""The docstring at the top of an exported file: what it trains, how it was proven, and how it is started."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import fiddle as fdl

from superpod.collection.facts import proof_level
from superpod.common import collection
from superpod.errors import UserError
from superpod.nemo2.export.source_comments import table
from superpod.nemo2.export.value_source import WIDTH

if TYPE_CHECKING:
    import nemo_run as run

    from superpod.collection.registry import Recipe
    from superpod.planner.layout import Layout

HEADING = """{name}

{about}

{written}

    python FILE.py               one node: starts a process for each of its GPUs
    torchrun ... FILE.py         several: --nnodes {nodes} --nproc-per-node {gpus}, and where they meet
    srun ... python FILE.py      a task for each GPU, with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR
                                 and MASTER_PORT in its environment
    run.run(recipe(), executor)  NeMo-Run: make the executor with env_vars=ENVIRONMENT
"""

PUBLISHED = re.compile(
    r" on (?P<gpus>\d+) GPUs: (?:published: (?P<other>.+?)|as published), (?P<source>[^;.]+(?:\.\d+)*)"
)
"""A comment of a layout file about a run that NVIDIA published."""


def heading(recipe: Recipe, partial: run.Partial, command: str, overrides: Sequence[str] = ()) -> str:
    """The docstring at the top of a recipe's file.

    Args:
        recipe: what was exported.
        partial: the same, with its overrides.
        command: the one that wrote the file.
        overrides: those of it.

    Raises:
        UserError: overrides have replaced a part that a recipe needs.
    """
    from superpod.nemo2.build.layout import layout_of

    try:
        layout = layout_of(partial)
    except (AttributeError, TypeError) as error:
        raise UserError(f"the overrides left no whole recipe: {error}", "keep its parts configurations") from error
    nodes, gpus = partial.trainer.num_nodes, partial.trainer.devices
    written = f"Written by `{command}` for {_versions()}. It needs nothing else: change it as you like."
    if own := _own_module(partial):
        written = f"Written by `{command}` for {_versions()}, and {own.name} beside it, from {own}."
    proven = f"Proof: {proof_level.sentence(recipe, nodes, overrides)}."
    about = f"{_about(recipe, partial, layout)} {proven}"
    return HEADING.format(name=recipe.name, about=_filled(about), written=_filled(written), nodes=nodes, gpus=gpus)


def _about(recipe: Recipe, partial: run.Partial, layout: Layout) -> str:
    from superpod.planner import explain

    nodes, gpus = partial.trainer.num_nodes, partial.trainer.devices
    sentences = [
        f"{recipe.model.title}.",
        f"{recipe.task.capitalize()}, {recipe.precision}, {nodes} x {gpus} {recipe.gpu}: {explain.title(layout)}, "
        f"gbs {layout.gbs}, {partial.data.seq_length} tokens a sample.",
        _published(recipe, layout, nodes * gpus),
        _planned(recipe, partial),
    ]
    return " ".join(filter(None, sentences))


def _published(recipe: Recipe, layout: Layout, gpus: int) -> str:
    """What NVIDIA published for this many GPUs, where it did and the layout is the recipe's own."""
    if not any(layout == own for own in recipe.layouts.values()):
        return ""
    for run_of in PUBLISHED.finditer(table(recipe)):
        if int(run_of["gpus"]) == gpus:
            other = f"{run_of['other']} here" if run_of["other"] else "this layout"
            return f"NVIDIA published {other} ({run_of['source']})."
    return ""


def _planned(recipe: Recipe, partial: run.Partial) -> str:
    """What the planner expects of the run."""
    from superpod.nemo2.validation.configured_job import of_partial
    from superpod.planner import predict

    expected = predict.one(of_partial(partial, recipe))
    if expected.step_time_s is None or expected.reserved_gib_max is None:
        return ""
    gib = f"{expected.reserved_gib_max:.3g}" if expected.reserved_gib_max < 10 else f"{expected.reserved_gib_max:.0f}"
    return f"Expected: {expected.step_time_s:.3g} s a step, {gib} GiB of a GPU's memory."


def _own_module(partial: run.Partial) -> Path | None:
    """The file of a user's collection that defines the model's configuration, if one does."""
    top = fdl.get_callable(partial.model.config).__module__.partition(".")[0]
    return next((path for path in collection.modules() if path.stem == top), None)


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _versions() -> str:
    names = {"NeMo": "nemo_toolkit", "NeMo-Run": "nemo_run", "Megatron-Core": "megatron-core"}
    *others, last = [f"{title} {metadata.version(name)}" for title, name in names.items()]
    return f"{', '.join(others)} and {last}"
