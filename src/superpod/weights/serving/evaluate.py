"""Evaluates the loss of a Hugging Face model on packed samples with transformers, independently of NeMo.

Runs in a separate process: `python -m superpod.weights.serving.evaluate FOLDER PACKED.npy OUT.json BATCH [ANSWERS]`.
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

MAX_NEW_TOKENS = 48
"""Maximum length of a generated answer."""
MAX_MEMORY_SHARE = 0.6
"""Maximum share of the available host memory for an FP32 model; a larger model keeps the data type of its files."""
MAX_CPU_PARAMETERS = 2e9
"""Maximum number of parameters of a model that generates answers on CPUs."""


@dataclass(frozen=True)
class Sample:
    """Token ids and loss mask of a sample in a packed sequence."""

    ids: Sequence[int]
    loss_mask: Sequence[int]
    """`loss_mask[i]` is 1 if the prediction of `ids[i + 1]` is in the loss."""


@dataclass(frozen=True)
class Answer:
    """Prompt, generated answer (greedy decoding) and expected answer of a sample, as text."""

    prompt: str
    answer: str
    expected: str


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats per token, numbers of tokens in the loss and samples, dtype of the model, and answers."""

    loss: float
    least: float
    most: float
    """Smallest and largest loss of a global batch. NeMo's val_loss is a mean over global batches and lies between them;
    their weights are undefined: NeMo 2.7.3 logs it without a batch size (megatron_strategy.py, validation_step)."""
    tokens: int
    samples: int
    dtype: str
    answers: list[Answer] = field(default_factory=list)


def iterate_samples(packed: Path, batch: int) -> Iterator[tuple[int, Sample]]:
    """Yield (index of the global batch, sample) for the samples of a packed file (see `data.samples.packing`).

    `batch` is the number of sequences per global batch. Padding, without a token in the loss, is skipped.
    """
    import numpy as np

    for number, row in enumerate(np.load(packed, allow_pickle=True)):
        ends = [*row["seq_start_id"][1:], len(row["input_ids"])]
        for start, end in zip(row["seq_start_id"], ends, strict=True):
            sample = Sample(row["input_ids"][start:end], row["loss_mask"][start : end - 1])
            if any(sample.loss_mask):
                yield number // batch, sample


def evaluate_model(folder: Path, packed: Path, batch: int, answers: int = 0) -> Evaluation:
    """Return the loss of the Hugging Face model in `folder` on a packed file.

    Args:
        folder: the model.
        packed: the .npy file.
        batch: sequences per global batch.
        answers: maximum number of answers to generate.

    Raises:
        ValueError: the file has no token in the loss.
    """
    model, tokenizer = _load_model(folder)
    sums: dict[int, tuple[float, int]] = {}
    seen_samples = 0
    listed: list[Answer] = []
    is_cheap = model.device.type != "cpu" or model.num_parameters() <= MAX_CPU_PARAMETERS
    for number, sample in iterate_samples(packed, batch):
        loss, tokens = _sum_losses(model, sample)
        previous_sums = sums.get(number, (0.0, 0))
        sums[number], seen_samples = (previous_sums[0] + loss, previous_sums[1] + tokens), seen_samples + 1
        if is_cheap and len(listed) < answers:
            listed.append(_generate_answer(model, tokenizer, sample))
    if not sums:
        raise ValueError(f"{packed} has no token in the loss")
    total, count = (sum(column) for column in zip(*sums.values(), strict=True))
    means = [loss / tokens for loss, tokens in sums.values()]
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return Evaluation(total / count, min(means), max(means), int(count), seen_samples, dtype, listed)


def _load_model(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer: on GPUs in the dtype of the files, else on CPUs in FP32 if the memory suffices."""
    import psutil
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    gpu = torch.cuda.is_available()
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    fits = 2 * size < MAX_MEMORY_SHARE * psutil.virtual_memory().available  # most folders store 16-bit weights
    dtype = torch.float32 if fits and not gpu else "auto"
    more: dict[str, Any] = {"trust_remote_code": False, **({"device_map": "auto"} if gpu else {})}
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=dtype, local_files_only=True, **more)
    return model.eval(), tokenizer


def _sum_losses(model: PreTrainedModel, sample: Sample) -> tuple[float, int]:
    """Return the sum of the losses of a sample in nats, and its number of tokens in the loss."""
    import torch

    ids = torch.tensor([sample.ids], dtype=torch.long, device=model.device)
    mask = torch.tensor(sample.loss_mask, dtype=torch.bool, device=model.device)
    with torch.no_grad():
        logits: torch.Tensor = model(ids[:, :-1]).logits[0].float()
    losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:].to(logits.device), reduction="none")
    return float(losses[mask.to(losses.device)].sum()), int(mask.sum())


def _generate_answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sample: Sample) -> Answer:
    """Generate the answer to the tokens before the first one in the loss, by greedy decoding."""
    import torch

    first = list(sample.loss_mask).index(1) + 1
    expected = [token for token, in_loss in zip(sample.ids[1:], sample.loss_mask, strict=True) if in_loss]
    prompt = torch.tensor([sample.ids[:first]], dtype=torch.long, device=model.device)
    generate: Any = model.generate
    with torch.no_grad():
        generated = generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=min(MAX_NEW_TOKENS, len(expected) + 8),
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )

    def text(tokens: Any) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    return Answer(text(sample.ids[:first]), text(generated[0, first:]), text(expected))


def main(folder: str, packed: str, out: str, batch: str, answers: str = "0") -> None:
    """Write the result of `evaluate_model` to the JSON file `out`. Arguments come from the command line."""
    measurement = evaluate_model(Path(folder), Path(packed), int(batch), int(answers))
    atomic_file.write(Path(out), json.dumps(asdict(measurement)))


if __name__ == "__main__":
    main(*sys.argv[1:])
