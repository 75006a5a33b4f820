"""`recipes perplexity`: compute the perplexity of a checkpoint on the samples in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from superpod.cli import tables
from superpod.cli.data.generate import Where, call_with_checkpoint, choose_checkpoint
from superpod.cli.options.request_options import AsJson
from superpod.errors import UserError


def perplexity(
    where: Where,
    data: Annotated[Path, typer.Option(help=".jsonl file of prompt-completion pairs, chats, or plain text.")],
    learn: Annotated[
        str, typer.Option(help="Assistant turns of a chat to score: answers (all turns) or last (the last turn).")
    ] = "answers",
    as_json: AsJson = False,
) -> None:
    """Compute the mean loss and the perplexity of a checkpoint on the answers in a file."""
    from superpod.data.samples import chat, samples

    if learn not in chat.LEARN:
        raise UserError(
            f"--learn must be one of {', '.join(chat.LEARN)}, not {learn}", f"for example --learn {chat.LEARN[0]}"
        )
    samples.read_samples(data)
    checkpoint = choose_checkpoint(where)
    score = call_with_checkpoint("perplexity", checkpoint, data=str(data.absolute()), learn=learn)
    if as_json:
        tables.print_json({"checkpoint": str(checkpoint.path), **score})
        return
    print(f"{checkpoint.name}: loss {score['loss']:.4f}, perplexity {score['perplexity']:.2f}")
    print(f"{score['tokens']} tokens in {score['samples']} samples")
