"""Parse, check and format Megatron's pipeline_model_parallel_layout strings, such as `Et*3|(tt|)*6mL`.

Bars separate the stages: E is the embedding, t a transformer layer, m a multi-token-prediction layer, L the loss.
Stages are in the order of the model: by virtual stage, then by pipeline rank. Rules and syntax are those of
megatron-core 0.15.3, transformer/pipeline_parallel_layer_layout.py; a test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from superpod.errors import UserError, cut
from superpod.planner.planned_job import PlannedJob

MAX_LENGTH = 100_000
"""Maximum number of letters in a layout after expanding repetitions; no model has so many layers."""
LETTERS = "EtmL"
REPEATED = (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)")
"""Patterns of repetitions. Megatron expands groups first, then single letters; nested groups are not supported."""
FORM = "use Megatron's syntax: Et*3|(tt|)*6tmL"


def parse(text: str) -> tuple[str, ...]:
    """Expand a layout string to the letters of each stage, in the order of the model.

    >>> parse("Et*3|(tt|)*2mL")
    ('Ettt', 'tt', 'tt', 'mL')

    Raises:
        UserError: a letter is unknown, or the layout is too long.
    """
    expanded = text.replace(",", "")  # Megatron ignores commas
    for pattern in REPEATED:
        if len(expanded) + sum(len(m[1]) * float(m[2]) for m in re.finditer(pattern, expanded)) > MAX_LENGTH:
            raise UserError(f"the pipeline layout {cut(text)} is longer than any model", FORM)
        expanded = re.sub(pattern, lambda match: match[1] * int(match[2]), expanded)
    if unknown := next((letter for letter in expanded if letter not in f"{LETTERS}|"), ""):
        raise UserError(f"the pipeline layout {cut(text)} contains {unknown!r}, which is not E, t, m, L or |", FORM)
    return tuple(expanded.split("|"))


def refusal(stages: Sequence[str], pp: int, layers: int, mtp_layers: int) -> str:
    """Return why Megatron rejects stages for `pp` pipeline ranks and a model of these sizes; "" if it accepts them."""
    letters = "".join(stages)
    if len(stages) % pp:
        return f"its {len(stages)} stages must be divisible by pp {pp}"
    if not letters.startswith("E") or letters.count("E") != 1:
        return "it must have one E, as the first layer"
    if not letters.endswith("L") or letters.count("L") != 1:
        return "it must have one L, as the last layer"
    if letters.count("t") != layers:
        return f"it has {letters.count('t')} layers (t), but the model has {layers}"
    if letters.count("m") != mtp_layers:
        return f"it has {letters.count('m')} multi-token-prediction layers (m), but the model has {mtp_layers}"
    if "t" in letters.partition("m")[2]:
        return "a t follows an m, but multi-token-prediction layers (m) must follow all layers (t)"
    if stages[-1].count("m") != mtp_layers:
        return "all m must be in the last stage"
    return ""


def count_layers(stages: Sequence[str]) -> tuple[int, ...]:
    """Return the number of transformer layers in each stage, as in `Layout.chunks`."""
    return tuple(stage.count("t") for stage in stages)


def from_job(job: PlannedJob) -> str:
    """Return the layout string of a legal job; "" if it has no pipeline parallelism."""
    if job.layout.pp == 1:
        return ""
    return from_chunks([len(chunk) for chunk in job.split.chunk_layers(job.model.layers)], job.model.mtp_layers)


def is_uneven(job: PlannedJob) -> bool:
    """Return whether a pipeline has uneven stages, so that the layout string must be passed to Megatron."""
    return job.layout.pp > 1 and job.layout.is_uneven


def from_chunks(chunks: Sequence[int], mtp_layers: int = 0) -> str:
    """Format the number of layers of each chunk as a layout string, with repetitions abbreviated.

    >>> from_chunks((3, 2, 2, 2, 1), 1)
    'Et*3|(tt|)*3tmL'
    """
    stages = [_format_layers(count) for count in chunks]
    stages[0] = f"E{stages[0]}"
    stages[-1] += "m" * mtp_layers + "L"
    runs = [(stage, len(list(same))) for stage, same in groupby(stages[:-1])]
    return "".join(f"({stage}|)*{count}" if count > 2 else f"{stage}|" * count for stage, count in runs) + stages[-1]


def _format_layers(count: int) -> str:
    """Return the letters of `count` layers: `tt` or `t*3`."""
    return "t" * count if count < 3 else f"t*{count}"
