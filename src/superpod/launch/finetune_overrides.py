"""Overrides of a fine-tuning: what it sets itself is refused by name, never dropped in silence."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError

if TYPE_CHECKING:
    import nemo_run as run

STEPS = "trainer.max_steps"
MAX_STEPS = 1_000_000
INTERVAL = "trainer.val_check_interval"
SIZES = ("data.seq_length", "data.global_batch_size", "data.micro_batch_size")
"""What samples are packed by; the fields themselves are then of packed sequences."""
WORKERS = "data.num_workers"

OWN = (
    (r"log\.ckpt\.every_n_train_steps", f"a fine-tuning saves after each validation: {INTERVAL}=N"),
    (r"log\.ckpt\.(monitor|mode|save_top_k|save_last|filename)", "it keeps its best and its newest checkpoint"),
    (r"trainer\.(check_val_every_n_epoch|limit_val_batches|limit_test_batches)",
     f"every validation reads all samples that are held out: --validation, and {INTERVAL}=N says how often"),
    (r"data", "the data of a fine-tuning are what --data and the options beside it say"),
)  # fmt: skip


def _values(overrides: Sequence[str]) -> dict[str, str]:
    return {path: value for path, _, value in (text.partition("=") for text in overrides)}


def refuse_own(overrides: Sequence[str]) -> None:
    """Refuse overrides of what a fine-tuning sets itself.

    Raises:
        UserError: naming the field, and what is said in its place.
    """
    for path in _values(overrides):
        if path in (*SIZES, WORKERS):
            continue
        for pattern, why in OWN:
            if re.match(rf"({pattern})(\W|$)", path):
                raise UserError(f"override {path}: {why}", "leave it out")


def with_steps(overrides: Sequence[str], steps: int | None) -> tuple[str, ...]:
    """The overrides and `--steps`, which is another word for trainer.max_steps.

    Raises:
        UserError: both are given and differ, or they are more than MOST_STEPS.
    """
    given = read_steps(overrides)
    if (wanted := steps or given or 0) > MAX_STEPS:
        raise UserError(
            f"{wanted:,} steps are more than a fine-tuning takes, {MAX_STEPS:,}: the list of its samples alone, "
            "8 bytes for each of a batch of 128 in every step, would have a gigabyte and more",
            "--steps 1000; --early-stopping N ends it where its loss falls no more",
        )
    if steps is None:
        return tuple(overrides)
    if given not in (None, steps):
        raise UserError(f"--steps {steps} and {STEPS}={given} contradict each other", "give one of them")
    return (*overrides, f"{STEPS}={steps}")


def read_steps(overrides: Sequence[str]) -> int | None:
    """The last `trainer.max_steps` among overrides; None where they name none, or no number."""
    given = _values(overrides).get(STEPS, "")
    return int(given) if given.isdecimal() else None


def refuse_interval(partial: run.Partial, overrides: Sequence[str], steps: int | None) -> None:
    """Refuse an interval of validations that the steps are no multiple of: the last step would not be validated.

    Raises:
        UserError: with the nearest intervals that are.
    """
    given, steps = _values(overrides).get(INTERVAL, ""), steps or int(partial.trainer.max_steps)
    if given.isdecimal() and (not int(given) or steps % int(given)):
        small = [n for n in range(1, math.isqrt(steps) + 1) if steps % n == 0]
        divisors = {*small, *(steps // n for n in small)}
        near = sorted(sorted(divisors, key=lambda n: abs(n - int(given)))[:2])
        raise UserError(
            f"{INTERVAL}={given}: {steps} steps are no multiple of it, and the last one would not be validated",
            f"nearest: {' or '.join(map(str, near))}",
        )


def worker_restorer(partial: run.Partial, overrides: Sequence[str]) -> Callable[[run.Partial], None]:
    """A function that gives the data of a fine-tuning the workers that an override names.

    Call this before the data are set, and the function afterwards.
    """
    given = WORKERS in _values(overrides)
    workers: Any = partial.data.num_workers if given else None

    def restore(changed: run.Partial) -> None:
        if given:
            changed.data.num_workers = workers

    return restore
