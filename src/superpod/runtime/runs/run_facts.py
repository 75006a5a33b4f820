"""What run.json and metrics.jsonl of a run folder may hold: files that people and other tools write too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from superpod.common.files import JsonObject, is_number, read_lines

FINETUNE = "finetune"
"""Key of run.json: what a fine-tuning was asked for (`launch.finetune.Task`)."""


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


_FACTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "recipe": (_is_text, "a string"),
    "t": (is_number, "a number"),
    "overrides": (lambda v: isinstance(v, list) and all(map(_is_text, v)), "a list of strings"),
    "data": (lambda v: v is None or _is_text(v), "a string or null"),
    "num_nodes": (lambda v: v is None or (_is_count(v) and v > 0), "a whole number from 1 on, or null"),
    "checkpoint_bytes": (_is_count, "a whole number"),
    **dict.fromkeys(
        ("max_steps", "nodes", "gpus_per_node", "attempts"),
        (lambda v: v is None or _is_count(v), "a whole number, or null"),
    ),
    "unigram_entropy_nats": (lambda v: v is None or is_number(v), "a number or null"),
}
_NUMBERS = ("t", "loss", "val_loss", "tokens", "step_time_s", "tokens_per_s_per_gpu", "allocated_gib")


def problem_in(facts: JsonObject) -> str:
    """What is wrong with the facts of a run.json, in words; '' when nothing is. Every key may be missing."""
    wrong = (f"{key} must be {words}" for key, (good, words) in _FACTS.items() if key in facts and not good(facts[key]))
    return next(wrong, "")


METRICS = "metrics.jsonl"
"""A run's file with one line per step."""


def read_metrics(run: Path) -> list[JsonObject]:
    """The lines of a run's metrics.jsonl as they were written: steps that a resumed run repeats, too."""
    return metrics(read_lines(run / METRICS))


def last_of_each_step(lines: Iterable[JsonObject]) -> list[JsonObject]:
    """The last line of each step, by step: a resumed run writes some again."""
    last = {line["step"]: line for line in lines}
    return [last[step] for step in sorted(last)]


def metrics(lines: Iterable[JsonObject]) -> list[JsonObject]:
    """Of lines of a metrics.jsonl those that can be drawn, with null for numbers that are nan or infinite.

    The step is an int, and the attempt a string; a time below zero is none of a step.
    """
    return [clean for line in lines if _is_metric(clean := {key: _finite(value) for key, value in line.items()})]


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_metric(line: JsonObject) -> bool:
    numbers = all(line.get(key) is None or is_number(line[key]) for key in _NUMBERS)
    return (
        numbers
        and _is_count(line.get("step"))
        and _is_text(line.get("attempt", ""))
        and (line.get("step_time_s") or 0.0) >= 0.0
    )
