"""`recipes perplexity`: how well a checkpoint predicts a file of answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from superpod.cli.data.generate import Where, call_on, chosen_checkpoint, print_json
from superpod.cli.options.request_options import AsJson
from superpod.errors import UserError


def perplexity(
    where: Where,
    data: Annotated[Path, typer.Option(help=".jsonl of prompts and completions, chats, or text.")],
    learn: Annotated[str, typer.Option(help="What of a chat counts: all answers, or the last.")] = "answers",
    as_json: AsJson = False,
) -> None:
    """Measure how well a checkpoint predicts the answers in a file: mean loss and perplexity."""
    from superpod.data.samples import chat, samples

    if learn not in chat.LEARN:
        raise UserError(f"--learn {learn} is not one of {', '.join(chat.LEARN)}")
    samples.read(data)
    chosen = chosen_checkpoint(where)
    score = call_on("perplexity", chosen, data=str(data.absolute()), learn=learn)
    if as_json:
        print_json({"checkpoint": str(chosen.path), **score})
        return
    print(f"{chosen.name}: loss {score['loss']:.4f}, perplexity {score['perplexity']:.2f}")
    print(f"{score['tokens']} tokens of {score['samples']} samples")
