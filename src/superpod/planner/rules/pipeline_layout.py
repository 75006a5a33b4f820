"""Parses, checks and writes Megatron's pipeline_model_parallel_layout strings, such as `Et*3|(tt|)*6mL`.

Bars separate the stages: E is the embedding, t a transformer layer, m a multi-token-prediction layer, L the loss.
Stages are in the order of the model: by virtual stage, then by pipeline rank. Rules and syntax are those of
megatron-core 0.15.3, transformer/pipeline_parallel_layer_layout.py, with which a test compares.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from superpod.errors import UserError, cut
from superpod.planner.planned_job import PlannedJob

LONGEST = 100_000
"""Most letters of a layout, once its repetitions are written out: no model has so many layers."""
LETTERS = "EtmL"
REPEATED = (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)")
"""Megatron repeats groups first, then single letters; groups within groups it does not know."""
FORM = "write it in Megatron's form: Et*3|(tt|)*6tmL"


def parse(text: str) -> tuple[str, ...]:
    """The stages in the order of the model, each as its letters.

    >>> parse("Et*3|(tt|)*2mL")
    ('Ettt', 'tt', 'tt', 'mL')

    Raises:
        UserError: a letter that Megatron does not know, or more layers than any model has.
    """
    whole = text.replace(",", "")  # Megatron takes them as decoration
    for pattern in REPEATED:
        if len(whole) + sum(len(m[1]) * float(m[2]) for m in re.finditer(pattern, whole)) > LONGEST:
            raise UserError(f"the pipeline layout {cut(text)} is longer than any model", FORM)
        whole = re.sub(pattern, lambda match: match[1] * int(match[2]), whole)
    if unknown := next((letter for letter in whole if letter not in f"{LETTERS}|"), ""):
        raise UserError(f"the pipeline layout {cut(text)} contains {unknown!r}, which is not E, t, m, L or |", FORM)
    return tuple(whole.split("|"))


def refusal(stages: Sequence[str], pp: int, layers: int, mtp_layers: int) -> str:
    """Return why Megatron refuses these stages for a model on `pp` pipeline ranks; "" if it accepts them."""
    letters = "".join(stages)
    if len(stages) % pp:
        return f"its {len(stages)} stages must be divisible by pp {pp}"
    if not letters.startswith("E") or letters.count("E") != 1:
        return "it must have one E, as the first layer"
    if not letters.endswith("L") or letters.count("L") != 1:
        return "it must have one L, as the last layer"
    if letters.count("t") != layers:
        return f"it has {letters.count('t')} x t, but the model has {layers} layers"
    if letters.count("m") != mtp_layers:
        return f"it has {letters.count('m')} x m, but the model has {mtp_layers} multi-token-prediction layers"
    if "t" in letters.partition("m")[2]:
        return "a t follows an m, but multi-token prediction must follow all layers"
    if stages[-1].count("m") != mtp_layers:
        return "all m must be in the last stage"
    return ""


def count_layers(stages: Sequence[str]) -> tuple[int, ...]:
    """Transformer layers of each stage: `Layout.chunks`."""
    return tuple(stage.count("t") for stage in stages)


def from_job(job: PlannedJob) -> str:
    """Return the layout string of a legal job; "" without pipeline parallelism."""
    if job.layout.pp == 1:
        return ""
    return from_chunks([len(chunk) for chunk in job.split.chunk_layers(job.model.layers)], job.model.mtp_layers)


def is_uneven(job: PlannedJob) -> bool:
    """Whether the partition of layers is uneven, so that Megatron needs it as an argument."""
    x = job.layout
    ends = x.embedding_as_layer or x.loss_as_layer or x.first_layers is not None or x.last_layers is not None
    return x.pp > 1 and (ends or x.chunks is not None)


def from_chunks(chunks: Sequence[int], mtp_layers: int = 0) -> str:
    """Return the layout string for the layers of each chunk, with repetitions abbreviated.

    >>> from_chunks((3, 2, 2, 2, 1), 1)
    'Et*3|(tt|)*3tmL'
    """
    stages = [_letters(count) for count in chunks]
    stages[0] = f"E{stages[0]}"
    stages[-1] += "m" * mtp_layers + "L"
    runs = [(stage, len(list(same))) for stage, same in groupby(stages[:-1])]
    return "".join(f"({stage}|)*{count}" if count > 2 else f"{stage}|" * count for stage, count in runs) + stages[-1]


def _letters(count: int) -> str:
    return "t" * count if count < 3 else f"t*{count}"
