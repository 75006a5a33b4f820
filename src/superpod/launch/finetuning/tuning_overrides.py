"""Check the overrides of a fine-tuning run: those of fields that fine-tuning sets itself are refused, not ignored."""

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
"""Overrides that determine how samples are packed. In the configuration, they are the sizes of packed sequences."""
WORKERS = "data.num_workers"

RESERVED = (
    (r"log\.ckpt\.every_n_train_steps", f"a fine-tuning run saves after each validation; set {INTERVAL}=N"),
    (r"log\.ckpt\.(monitor|mode|save_top_k|save_last|filename)",
     "a fine-tuning run keeps its best and its latest checkpoint"),
    (r"trainer\.(check_val_every_n_epoch|limit_val_batches|limit_test_batches)",
     f"every validation uses all held-out samples: see --validation; {INTERVAL}=N sets the interval"),
    (r"data", "a fine-tuning run takes its data from --data and related options"),
)  # fmt: skip


def values_by_path(overrides: Sequence[str]) -> dict[str, str]:
    """Return path -> value of overrides `path=value`; later overrides take precedence."""
    return {path: value for path, _, value in (text.partition("=") for text in overrides)}


def refuse_reserved(overrides: Sequence[str]) -> None:
    """Raise UserError if an override is of a field that fine-tuning sets itself; the message has the alternative."""
    for path in values_by_path(overrides):
        if path in (*SIZES, WORKERS):
            continue
        for pattern, why in RESERVED:
            if re.match(rf"({pattern})(\W|$)", path):
                raise UserError(f"override {path}: {why}", "omit the override")


def with_steps(overrides: Sequence[str], steps: int | None) -> tuple[str, ...]:
    """Return the overrides with `--steps` appended as trainer.max_steps.

    Raises UserError if both are given and differ, or the steps exceed MAX_STEPS.
    """
    override_steps = read_steps(overrides)
    requested_steps = steps or override_steps or 0
    if requested_steps > MAX_STEPS:
        raise UserError(
            f"{requested_steps:,} steps exceed the maximum for fine-tuning, {MAX_STEPS:,}: the list of samples alone, "
            "8 bytes for each of 128 samples per step, would exceed a gigabyte",
            "use for example --steps 1000; --early-stopping N stops when the loss no longer decreases",
        )
    if steps is None:
        return tuple(overrides)
    if override_steps not in (None, steps):
        raise UserError(f"--steps {steps} conflicts with {STEPS}={override_steps}", "omit one of the two")
    return (*overrides, f"{STEPS}={steps}")


def read_steps(overrides: Sequence[str]) -> int | None:
    """Return the value of the last override of `trainer.max_steps`; None if there is none, or it is not a number."""
    steps_text = values_by_path(overrides).get(STEPS, "")
    return int(steps_text) if steps_text.isdecimal() else None


def refuse_interval(partial: run.Partial, overrides: Sequence[str], steps: int | None) -> None:
    """Raise UserError if the validation interval does not divide the number of steps; the hint has the nearest ones.

    The last step would not be validated. `steps` None = the number of steps in the configuration.
    """
    given, steps = values_by_path(overrides).get(INTERVAL, ""), steps or int(partial.trainer.max_steps)
    if given.isdecimal() and (not int(given) or steps % int(given)):
        small_divisors = [n for n in range(1, math.isqrt(steps) + 1) if steps % n == 0]
        divisors = {*small_divisors, *(steps // n for n in small_divisors)}
        nearest_divisors = sorted(sorted(divisors, key=lambda n: abs(n - int(given)))[:2])
        raise UserError(
            f"{INTERVAL}={given} does not divide the {steps} steps, so the last step would not be validated",
            f"use {' or '.join(map(str, nearest_divisors))}",
        )


def worker_restorer(partial: run.Partial, overrides: Sequence[str]) -> Callable[[run.Partial], None]:
    """Return a function that sets an overridden number of data workers again.

    Call this before the data module is replaced, and the returned function afterwards.
    """
    is_overridden = WORKERS in values_by_path(overrides)
    workers: Any = partial.data.num_workers if is_overridden else None

    def restore(changed: run.Partial) -> None:
        if is_overridden:
            changed.data.num_workers = workers

    return restore
