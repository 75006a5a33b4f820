"""A checkpoint asked: how well it knows given text, and what it says. Needs NeMo; one process, on a GPU if it can."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from superpod.errors import UserError
from superpod.recipes.weights import load


def perplexity(checkpoint: str, data: str) -> dict[str, Any]:
    """Mean loss (nats) of the learnt tokens of every sample in a .jsonl file, and its exponential.

    Raises:
        UserError: lines that are no samples, or a checkpoint without a tokenizer.
    """
    from superpod.recipes.data import chat, samples

    read = samples.read(Path(data))
    model, words = _loaded(checkpoint)
    total, count = 0.0, 0
    for each in read:
        encoded = chat.encode(each, words)
        losses = token_losses(model, encoded.ids)
        learnt = encoded.learnt[1:]
        total += sum(loss for loss, on in zip(losses, learnt, strict=True) if on)
        count += sum(learnt)
    loss = total / count
    return {"loss": loss, "perplexity": math.exp(min(loss, 700)), "tokens": count, "samples": len(read)}


def token_losses(model: Any, ids: Sequence[int]) -> list[float]:
    """Loss of each token but the first, given those before it."""
    import torch

    tokens = torch.tensor([ids], device=_device())
    with torch.no_grad():
        positions = torch.arange(len(ids) - 1, device=tokens.device)[None]
        found = load.core(model)(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
    return found[0].float().tolist()


def generate(
    checkpoint: str,
    prompts: Sequence[str],
    tokens: int = 32,
    temperature: float = 0.0,
    seed: int = 1234,
    chat: bool = False,
) -> list[str]:
    """What the model says after each prompt, of at most so many tokens; temperature 0 takes the likeliest each time.

    With `chat`, a prompt is the user's message. Nothing is cached between tokens: meant for a glance, not for serving.
    """
    import torch

    model, words = _loaded(checkpoint)
    draw = torch.Generator().manual_seed(seed)
    return [_continued(model, words, _prompt(words, each, chat), tokens, temperature, draw) for each in prompts]


def _prompt(words: Any, text: str, chat: bool) -> list[int]:
    if not chat:
        return words(text, verbose=False)["input_ids"]
    asked = words.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
    return words(asked, add_special_tokens=False, verbose=False)["input_ids"]


def _continued(model: Any, words: Any, ids: list[int], tokens: int, temperature: float, draw: Any) -> str:
    import torch

    begin, rows = len(ids), len(words)
    for _ in range(tokens):
        given = torch.tensor([ids], device=_device())
        with torch.no_grad():
            positions = torch.arange(len(ids), device=given.device)[None]
            last = load.core(model)(given, positions, None)[0, -1, :rows].float().cpu()  # padding rows are no words
        if temperature > 0:
            chosen = int(torch.multinomial(torch.softmax(last / temperature, -1), 1, generator=draw))
        else:
            chosen = int(last.argmax())
        ids = [*ids, chosen]
        if chosen == words.eos_token_id:
            break
    return words.decode(ids[begin:], skip_special_tokens=True)


def _loaded(checkpoint: str) -> tuple[Any, Any]:
    import torch

    from superpod.recipes.data import chat

    gpu = torch.cuda.is_available()
    model = load.load(Path(checkpoint), torch.bfloat16 if gpu else torch.float32, gpu=gpu)
    words: Any = getattr(model.tokenizer, "tokenizer", None)
    if not getattr(words, "is_fast", False):
        raise UserError(
            f"{checkpoint} has no tokenizer that can be read here", "train with --data, or from a Hugging Face folder"
        )
    return model, chat.ready(words, checkpoint)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
