"""Write the docstring at the top of an exported file: model, layout, prediction, proof level and start commands."""

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
from superpod.nemo2.export.source_comments import recipe_comment
from superpod.nemo2.export.value_source import WIDTH

if TYPE_CHECKING:
    import nemo_run as run

    from superpod.collection.registry import Recipe
    from superpod.planner.layout import Layout

HEADING = """{name}

{about}

{written}

    python FILE.py               on one node; starts one process per GPU
    torchrun ... FILE.py         on several nodes, with --nnodes {nodes} --nproc-per-node {gpus} and a
                                 rendezvous endpoint
    srun ... python FILE.py      one task per GPU, with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR
                                 and MASTER_PORT in the environment
    run.run(recipe(), executor)  with NeMo-Run; pass env_vars=ENVIRONMENT to the executor
"""

TASK_TITLES = {"pretrain": "Pretraining", "sft": "SFT", "lora": "LoRA", "dora": "DoRA"}

PUBLISHED = re.compile(
    r" on (?P<gpus>\d+) GPUs: (?:published: (?P<other>.+?)|as published), (?P<source>[^;.]+(?:\.\d+)*)"
)
"""A comment in a layout file on a layout that NVIDIA published."""


def heading(recipe: Recipe, partial: run.Partial, command: str, overrides: Sequence[str] = ()) -> str:
    """Return the docstring of an exported file, without quotes.

    Args:
        recipe: the exported recipe.
        partial: its configuration, overrides included.
        command: the command that writes the file, for the text.
        overrides: the overrides in the command.

    Raises:
        UserError: an override removed a part that every recipe needs.
    """
    from superpod.nemo2.build.layout import read_layout

    try:
        layout = read_layout(partial)
    except (AttributeError, TypeError) as error:
        message = f"the overrides make the recipe incomplete: {error}"
        raise UserError(message, "do not replace an object, such as trainer.strategy, with a plain value") from error
    nodes, gpus = partial.trainer.num_nodes, partial.trainer.devices
    module = _user_module(partial)
    requirement = "It does not need superpod-recipes; edit it freely."
    if module:
        requirement = f"It also requires a copy of {module} as {module.name}."
    written_by = f"Written by `{command}` for {_versions()}. {requirement}"
    description = f"{_describe(recipe, partial, layout)} Proof: {proof_level.sentence(recipe, nodes, overrides)}."
    return HEADING.format(name=recipe.name, about=_wrap(description), written=_wrap(written_by), nodes=nodes, gpus=gpus)


def _describe(recipe: Recipe, partial: run.Partial, layout: Layout) -> str:
    """Return sentences about the model, task, hardware, layout and prediction."""
    from superpod.planner import explain

    nodes, gpus = partial.trainer.num_nodes, partial.trainer.devices
    sentences = [
        f"{recipe.model.title}.",
        f"{TASK_TITLES[recipe.task]} in {recipe.precision} on {nodes} x {gpus} {recipe.gpu}: {explain.title(layout)}, "
        f"global batch size {layout.gbs}, sequence length {partial.data.seq_length}.",
        _describe_published(recipe, layout, nodes * gpus),
        _describe_prediction(recipe, partial),
    ]
    return " ".join(filter(None, sentences))


def _describe_published(recipe: Recipe, layout: Layout, gpus: int) -> str:
    """Return a sentence on the layout that NVIDIA published for this number of GPUs.

    Return "" if there is none, or the recipe does not declare `layout`.
    """
    if layout not in recipe.layouts.values():
        return ""
    for comment in PUBLISHED.finditer(recipe_comment(recipe)):
        if int(comment["gpus"]) == gpus:
            published = f"{comment['other']} for this number of GPUs" if comment["other"] else "this layout"
            return f"NVIDIA published {published} ({comment['source']})."
    return ""


def _describe_prediction(recipe: Recipe, partial: run.Partial) -> str:
    """Return a sentence with the predicted step time and memory; "" if the planner cannot predict them."""
    from superpod.nemo2.validation.configured_job import job_from_partial
    from superpod.planner import predict

    predicted = predict.one(job_from_partial(partial, recipe))
    step_time, memory = predicted.step_time_s, predicted.reserved_gib_max
    if step_time is None or memory is None:
        return ""
    gib = f"{memory:.3g}" if memory < 10 else f"{memory:.0f}"
    return f"Predicted: {step_time:.3g} s per step, {gib} GiB of memory per GPU."


def _user_module(partial: run.Partial) -> Path | None:
    """Return the file of a collection that defines the model's configuration class; None = it is installed."""
    package = fdl.get_callable(partial.model.config).__module__.partition(".")[0]
    return next((path for path in collection.modules() if path.stem == package), None)


def _wrap(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _versions() -> str:
    """Return the installed versions of NeMo, NeMo-Run and Megatron-Core as text."""
    names = {"NeMo": "nemo_toolkit", "NeMo-Run": "nemo_run", "Megatron-Core": "megatron-core"}
    *others, last = [f"{title} {metadata.version(name)}" for title, name in names.items()]
    return f"{', '.join(others)} and {last}"
