"""Check the overrides of a fine-tuning run: fields that fine-tuning sets itself are refused, instead of ignored."""

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
"""Sizes that determine how samples are packed; the fields then describe packed sequences."""
WORKERS = "data.num_workers"

RESERVED = (
    (r"log\.ckpt\.every_n_train_steps", f"a fine-tuning run saves after each validation; set {INTERVAL}=N"),
    (r"log\.ckpt\.(monitor|mode|save_top_k|save_last|filename)",
     "a fine-tuning run keeps its best and its latest checkpoint"),
    (r"trainer\.(check_val_every_n_epoch|limit_val_batches|limit_test_batches)",
     f"every validation uses all held-out samples: see --validation; {INTERVAL}=N sets the interval"),
    (r"data", "a fine-tuning run takes its data from --data and related options"),
)  # fmt: skip


def _values(overrides: Sequence[str]) -> dict[str, str]:
    return {path: value for path, _, value in (text.partition("=") for text in overrides)}


def refuse_reserved(overrides: Sequence[str]) -> None:
    """Refuse overrides of fields that fine-tuning sets itself.

    Raises:
        UserError: there is such an override; the message says what to use instead.
    """
    for path in _values(overrides):
        if path in (*SIZES, WORKERS):
            continue
        for pattern, why in RESERVED:
            if re.match(rf"({pattern})(\W|$)", path):
                raise UserError(f"override {path}: {why}", "leave out the override")


def with_steps(overrides: Sequence[str], steps: int | None) -> tuple[str, ...]:
    """Return the overrides with `--steps` appended as trainer.max_steps.

    Raises:
        UserError: both are given and differ, or the steps exceed MAX_STEPS.
    """
    override_steps = read_steps(overrides)
    requested_steps = steps or override_steps or 0
    if requested_steps > MAX_STEPS:
        raise UserError(
            f"{requested_steps:,} steps exceed the maximum for fine-tuning, {MAX_STEPS:,}: the list of samples alone, "
            "8 bytes for each of 128 samples per step, would exceed a gigabyte",
            "--steps 1000; --early-stopping N stops when the loss no longer decreases",
        )
    if steps is None:
        return tuple(overrides)
    if override_steps not in (None, steps):
        raise UserError(f"--steps {steps} conflicts with {STEPS}={override_steps}", "leave one of them out")
    return (*overrides, f"{STEPS}={steps}")


def read_steps(overrides: Sequence[str]) -> int | None:
    """Return the last `trainer.max_steps` among overrides; None if there is none, or it is not a number."""
    steps_text = _values(overrides).get(STEPS, "")
    return int(steps_text) if steps_text.isdecimal() else None


def refuse_interval(partial: run.Partial, overrides: Sequence[str], steps: int | None) -> None:
    """Refuse a validation interval that does not divide the number of steps: the last step would not be validated.

    Raises:
        UserError: the interval is refused; the message lists the nearest valid intervals.
    """
    given, steps = _values(overrides).get(INTERVAL, ""), steps or int(partial.trainer.max_steps)
    if given.isdecimal() and (not int(given) or steps % int(given)):
        small_divisors = [n for n in range(1, math.isqrt(steps) + 1) if steps % n == 0]
        divisors = {*small_divisors, *(steps // n for n in small_divisors)}
        nearest_divisors = sorted(sorted(divisors, key=lambda n: abs(n - int(given)))[:2])
        raise UserError(
            f"{INTERVAL}={given} does not divide the {steps} steps, so the last step would not be validated",
            f"nearest: {' or '.join(map(str, nearest_divisors))}",
        )


def worker_restorer(partial: run.Partial, overrides: Sequence[str]) -> Callable[[run.Partial], None]:
    """Return a function that restores an overridden number of data workers.

    Call this before the data module is replaced, and the returned function afterwards.
    """
    is_overridden = WORKERS in _values(overrides)
    workers: Any = partial.data.num_workers if is_overridden else None

    def restore(changed: run.Partial) -> None:
        if is_overridden:
            changed.data.num_workers = workers

    return restore
