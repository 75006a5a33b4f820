"""Evaluates a NeMo checkpoint on text, and generates text with it, on one GPU or on CPUs. Needs NeMo."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.common import progress_file
from superpod.errors import UserError
from superpod.weights.transfer import load

if TYPE_CHECKING:
    import torch
    from nemo.collections.llm import GPTModel
    from transformers import PreTrainedTokenizerBase


def perplexity(checkpoint: str, data: str, learn: str = "answers") -> dict[str, float]:
    """Return the loss (mean, nats per token), perplexity, tokens and samples of a sample file, under these keys.

    `learn` selects the messages of a chat that are in the loss, as in `chat.encode_sample`.

    Raises:
        UserError: a line of `data` is not a sample, or the checkpoint has no tokenizer.
    """
    from superpod.data.samples import chat, samples

    rows = samples.read_samples(Path(data))
    model, tokenizer = _load_checkpoint(checkpoint)
    total, count = 0.0, 0
    for number, sample in enumerate(rows):
        if number % 100 == 0:
            progress_file.note(f"sample {number + 1} of {len(rows)}")
        encoded = chat.encode_sample(sample, tokenizer, learn)
        losses = compute_token_losses(model, encoded.ids)
        mask = encoded.loss_mask[1:]
        total += sum(loss for loss, in_loss in zip(losses, mask, strict=True) if in_loss)
        count += sum(mask)
    loss = total / count
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700)),  # exp(710) overflows
        "tokens": count,
        "samples": len(rows),
    }


def compute_token_losses(model: GPTModel, ids: Sequence[int]) -> list[float]:
    """Return the loss in nats of each token except the first, given the preceding tokens."""
    import torch

    tokens = torch.tensor([ids], dtype=torch.long, device=_select_device())
    with torch.no_grad():
        positions = torch.arange(len(ids) - 1, device=tokens.device)[None]
        losses = load.unwrap_model(model)(tokens[:, :-1], positions, None, labels=tokens[:, 1:])  # [1, tokens - 1]
    return losses[0].float().tolist()


def generate(
    checkpoint: str,
    prompts: Sequence[str],
    tokens: int = 32,
    temperature: float = 0.0,
    seed: int = 1234,
    chat: bool = False,
) -> list[str]:
    """Return the generated text for each prompt.

    There is no KV cache, so each token takes a complete forward pass. Use this for spot checks, not for serving.

    Args:
        checkpoint: the NeMo checkpoint.
        prompts: texts to continue.
        tokens: maximum number of generated tokens per prompt.
        temperature: sampling temperature; 0 for greedy decoding.
        seed: seed for sampling.
        chat: whether a prompt is a user message, to be rendered with the chat template.
    """
    import torch

    model, tokenizer = _load_checkpoint(checkpoint)
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for number, prompt in enumerate(prompts, 1):
        progress_file.note(f"prompt {number} of {len(prompts)}, at most {tokens} tokens")
        ids = _tokenize_prompt(tokenizer, prompt, chat)
        texts.append(_generate_text(model, tokenizer, ids, tokens, temperature, generator))
    return texts


def _tokenize_prompt(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool) -> list[int]:
    if not chat:
        return tokenizer(text, verbose=False).data["input_ids"]
    messages = [{"role": "user", "content": text}]
    chat_text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return tokenizer(chat_text, add_special_tokens=False, verbose=False).data["input_ids"]


def _generate_text(
    model: GPTModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> str:
    import torch

    begin, vocab = len(ids), len(tokenizer)
    for _ in range(tokens):
        context = torch.tensor([ids], dtype=torch.long, device=_select_device())
        with torch.no_grad():
            positions = torch.arange(len(ids), device=context.device)[None]
            # Without the padding of the vocabulary.
            logits = load.unwrap_model(model)(context, positions, None)[0, -1, :vocab].float().cpu()
        if temperature > 0:
            token = int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator))
        else:
            token = int(logits.argmax())
        ids = [*ids, token]
        if token == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[begin:], skip_special_tokens=True)


def _load_checkpoint(checkpoint: str) -> tuple[GPTModel, PreTrainedTokenizerBase]:
    import torch

    from superpod.data.samples import chat

    progress_file.note("loading the checkpoint")
    gpu = torch.cuda.is_available()
    model = load.load_model(Path(checkpoint), torch.bfloat16 if gpu else torch.float32, gpu=gpu)
    tokenizer = getattr(model.tokenizer, "tokenizer", None)  # NeMo's class wraps that of transformers
    if tokenizer is None or not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"{checkpoint} has no tokenizer, or none that this machine can read",
            "use a checkpoint that was trained with --data, or imported from a Hugging Face folder",
        )
    return model, chat.prepare_tokenizer(tokenizer, checkpoint)


def _select_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
