"""Validate run.json and metrics.jsonl of a run folder, which users or other tools may have edited."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from superpod.common.json_files import JsonObject, is_number, read_lines

FINETUNE = "finetune"
"""Key of run.json: the fine-tuning request (`launch.finetuning.finetune.Task`)."""


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


_FACTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "recipe": (_is_text, "a string"),
    "t": (is_number, "a number"),
    "overrides": (lambda v: isinstance(v, list) and all(map(_is_text, v)), "a list of strings"),
    "data": (lambda v: v is None or _is_text(v), "a string or null"),
    "num_nodes": (lambda v: v is None or (_is_count(v) and v > 0), "a positive integer or null"),
    "checkpoint_bytes": (_is_count, "a non-negative integer"),
    **dict.fromkeys(
        ("max_steps", "nodes", "gpus_per_node", "attempts"),
        (lambda v: v is None or _is_count(v), "a non-negative integer or null"),
    ),
    "unigram_entropy_nats": (lambda v: v is None or is_number(v), "a number or null"),
}
_NUMBERS = ("t", "loss", "val_loss", "tokens", "step_time_s", "tokens_per_s_per_gpu", "allocated_gib")


def problem_in(facts: JsonObject) -> str:
    """Return a message about the first invalid value in run.json; '' if all are valid. Keys may be missing."""
    for key, (is_valid, expected) in _FACTS.items():
        if key in facts and not is_valid(facts[key]):
            return f"{key} must be {expected}"
    return ""


METRICS = "metrics.jsonl"
"""File in the run folder with one line per step."""


def read_metrics(run: Path) -> list[JsonObject]:
    """Return the valid lines of a run's metrics.jsonl, including steps that a resumed run has repeated."""
    return metrics(read_lines(run / METRICS))


def last_of_each_step(lines: Iterable[JsonObject]) -> list[JsonObject]:
    """Return the last line of each step, ordered by step. A resumed run may have repeated steps."""
    last = {line["step"]: line for line in lines}
    return [last[step] for step in sorted(last)]


def metrics(lines: Iterable[JsonObject]) -> list[JsonObject]:
    """Return the valid lines among `lines` of metrics.jsonl, with None for non-finite numbers.

    In valid lines, the step is an int, the attempt a string, and the step time not negative.
    """
    valid_lines = []
    for line in lines:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        if _is_valid_line(finite):
            valid_lines.append(finite)
    return valid_lines


def _is_valid_line(line: JsonObject) -> bool:
    has_numbers = all(line.get(key) is None or is_number(line[key]) for key in _NUMBERS)
    return (
        has_numbers
        and _is_count(line.get("step"))
        and _is_text(line.get("attempt", ""))
        and (line.get("step_time_s") or 0.0) >= 0.0
    )
