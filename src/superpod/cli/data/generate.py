"""`recipes generate`: generate text with the model in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from superpod.cli import tables
from superpod.cli.options.request_options import AsJson, resolve_folder
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.reports.runs.checkpoint_list import Checkpoint

Where = Annotated[
    Path,
    typer.Argument(help="Checkpoint, or run (or `last`), whose best checkpoint is used.", callback=resolve_folder),
]

WORK = {"generate": "generating", "perplexity": "measuring perplexity"}
"""Progress message per function of weights/serving/generate.py."""


def generate(
    where: Where,
    prompts: Annotated[list[str], typer.Argument(help="Texts for the model to continue.")],
    tokens: Annotated[int, typer.Option(min=1, max=4096, help="Maximum number of tokens to generate.")] = 32,
    temperature: Annotated[float, typer.Option(min=0, max=10, help="Sampling temperature; 0 = greedy decoding.")] = 0.0,
    chat: Annotated[bool, typer.Option("--chat", help="Format prompts as user messages in a chat.")] = False,
    seed: Annotated[int, typer.Option(help="Random seed for sampling.")] = 1234,
    as_json: AsJson = False,
) -> None:
    """Continue prompts with the model in a checkpoint, on a GPU or the CPUs of this machine."""
    if not all(prompt.strip() for prompt in prompts):
        raise UserError("a prompt is empty", "pass text for the model to continue")
    checkpoint = choose_checkpoint(where)
    settings = {"prompts": prompts, "tokens": tokens, "temperature": temperature, "seed": seed, "chat": chat}
    continued = call_with_checkpoint("generate", checkpoint, **settings)
    if as_json:
        answers = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, continued, strict=True)]
        tables.print_json({"checkpoint": str(checkpoint.path), "answers": answers})
        return
    for prompt, answer in zip(prompts, continued, strict=True):
        print(f"{prompt} | {answer}" if not chat else f"user: {prompt}\nassistant: {answer}")


def choose_checkpoint(where: Path) -> Checkpoint:
    """Return a checkpoint, or the best one of a run. Raises UserError if it does not fit in this machine's memory."""
    from superpod.rehearsal.training.forked_run import available_gib
    from superpod.reports.runs import checkpoint_list

    checkpoint = checkpoint_list.choose_best(checkpoint_list.list_checkpoints(where))
    need = 1.0 + checkpoint.parameters * 8 / 2**30  # fp32 twice: the model and the copy being read
    available = available_gib()
    if need > available:
        raise UserError(
            f"{checkpoint.name} needs about {need:.0f} GiB of memory, but {available:.0f} GiB are free",
            "use a machine with more memory",
        )
    return checkpoint


def call_with_checkpoint(function: str, checkpoint: Checkpoint, **arguments: object) -> Any:
    """Call a function of weights/serving/generate.py with a checkpoint in a separate process, and return its result."""
    from superpod.launch import subprocess_call
    from superpod.launch.display.progress_bar import spinner, stderr_console

    with spinner(stderr_console(), f"{WORK[function]} with {checkpoint.name} (1 to 2 min)"):
        return subprocess_call.call_once(
            f"superpod.weights.serving.generate:{function}", checkpoint=str(checkpoint.path), **arguments
        )
