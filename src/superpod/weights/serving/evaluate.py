"""The loss of a Hugging Face folder on packed samples, by transformers alone: a judge that knows nothing of NeMo.

Run as a process of its own: `python -m superpod.weights.serving.evaluate FOLDER PACKED.npy OUT.json BATCH [ANSWERS]`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.common import atomic_file

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NEW_TOKENS = 48
"""Of an answer that is generated, at most."""
SHARE_OF_MEMORY = 0.6
"""Of the free memory of a machine that a model in 32 bits may take; beyond that it keeps its own number format."""
CHEAP_PARAMETERS = 2e9
"""Up to which answers are generated on CPUs."""


@dataclass(frozen=True)
class Sample:
    """One sample of a packed sequence."""

    ids: Sequence[int]
    learnt: Sequence[int]
    """1 where the prediction of `ids[i + 1]` counts"""


@dataclass(frozen=True)
class Answer:
    """What the model says to the prompt of a sample, by its likeliest tokens."""

    prompt: str
    answer: str
    expected: str


@dataclass(frozen=True)
class Measured:
    """Mean loss of the learnt tokens, nats, and what it was measured on."""

    loss: float
    least: float
    most: float
    """Of the losses of its global batches. NeMo's val_loss is a mean of those and lies between them: NeMo 2.7.3 logs it
    without a batch size (megatron_strategy.py, validation_step), so that how Lightning weighs them is an accident."""
    tokens: int
    samples: int
    dtype: str
    answers: list[Answer] = field(default_factory=list)


def samples(packed: Path, batch: int) -> Iterator[tuple[int, Sample]]:
    """The samples of a file that `recipes.data.packing` wrote, with their global batch of `batch` sequences.

    Those of filling, which teach nothing, are left out.
    """
    import numpy as np

    for number, row in enumerate(np.load(packed, allow_pickle=True)):
        ends = [*row["seq_start_id"][1:], len(row["input_ids"])]
        for start, end in zip(row["seq_start_id"], ends, strict=True):
            sample = Sample(row["input_ids"][start:end], row["loss_mask"][start : end - 1])
            if any(sample.learnt):
                yield number // batch, sample


def measure(folder: Path, packed: Path, batch: int, answers: int = 0) -> Measured:
    """The loss of the model in `folder` on a packed file, read in global batches of `batch`, and so many answers.

    Raises:
        ValueError: the file has no token to learn.
    """

    model, tokenizer = _load(folder)
    sums: dict[int, tuple[float, int]] = {}
    seen = 0
    listed: list[Answer] = []
    cheap = model.device.type != "cpu" or model.num_parameters() <= CHEAP_PARAMETERS
    for number, sample in samples(packed, batch):
        loss, tokens = _loss(model, sample)
        before = sums.get(number, (0.0, 0))
        sums[number], seen = (before[0] + loss, before[1] + tokens), seen + 1
        if cheap and len(listed) < answers:
            listed.append(_answer(model, tokenizer, sample))
    if not sums:
        raise ValueError(f"{packed} has no token to learn")
    total, count = (sum(column) for column in zip(*sums.values(), strict=True))
    means = [loss / tokens for loss, tokens in sums.values()]
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return Measured(total / count, min(means), max(means), int(count), seen, dtype, listed)


def _load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """On the GPUs in the folder's number format where there are any; else on CPUs in 32 bits, where they fit."""
    import psutil
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    gpu = torch.cuda.is_available()
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    fits = 2 * size < SHARE_OF_MEMORY * psutil.virtual_memory().available  # most folders have 16 bits a number
    dtype = torch.float32 if fits and not gpu else "auto"
    more: dict[str, Any] = {"trust_remote_code": False, **({"device_map": "auto"} if gpu else {})}
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=dtype, local_files_only=True, **more)
    return model.eval(), tokenizer


def _loss(model: PreTrainedModel, sample: Sample) -> tuple[float, int]:
    """Sum of the losses of a sample's learnt tokens, and their count."""
    import torch

    ids = torch.tensor([sample.ids], dtype=torch.long, device=model.device)
    learnt = torch.tensor(sample.learnt, dtype=torch.bool, device=model.device)
    with torch.no_grad():
        logits: torch.Tensor = model(ids[:, :-1]).logits[0].float()
    losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:].to(logits.device), reduction="none")
    return float(losses[learnt.to(losses.device)].sum()), int(learnt.sum())


def _answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sample: Sample) -> Answer:
    """The likeliest tokens after what comes before the sample's first learnt token."""
    import torch

    first = list(sample.learnt).index(1) + 1
    expected = [token for token, learnt in zip(sample.ids[1:], sample.learnt, strict=True) if learnt]
    prompt = torch.tensor([sample.ids[:first]], dtype=torch.long, device=model.device)
    generate: Any = model.generate
    with torch.no_grad():
        made = generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=min(NEW_TOKENS, len(expected) + 8),
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )

    def text(tokens: Any) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    return Answer(text(sample.ids[:first]), text(made[0, first:]), text(expected))


def main(folder: str, packed: str, out: str, batch: str, answers: str = "0") -> None:
    """Write what `measure` gives as JSON."""
    measured = measure(Path(folder), Path(packed), int(batch), int(answers))
    atomic_file.write(Path(out), json.dumps(asdict(measured)))


if __name__ == "__main__":
    main(*sys.argv[1:])
