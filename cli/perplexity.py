"""`recipes perplexity`: how well a checkpoint predicts a file of answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from superpod.cli.generate import Where, call_on, chosen_checkpoint, print_json
from superpod.cli.request_options import AsJson


def perplexity(
    where: Where,
    data: Annotated[Path, typer.Option(help=".jsonl of prompts and completions, chats, or text.")],
    as_json: AsJson = False,
) -> None:
    """Measure how well a checkpoint predicts the answers in a file: mean loss and perplexity."""
    from superpod.recipes.data import samples

    samples.read(data)
    chosen = chosen_checkpoint(where)
    score = call_on("perplexity", chosen, data=str(data.absolute()))
    if as_json:
        print_json({"checkpoint": str(chosen.path), **score})
        return
    print(f"{chosen.name}: loss {score['loss']:.4f}, perplexity {score['perplexity']:.2f}")
    print(f"{score['tokens']} tokens of {score['samples']} samples")
