"""Patterns and fields of log lines of Megatron-LM, Megatron-Bridge and NeMo.

Formats, as of November 2026: NVIDIA/Megatron-LM megatron/training/training.py (`training_log`,
`evaluate_and_print_results`), arguments.py (`_print_args`), utils.py (`report_memory`); NVIDIA-NeMo/Megatron-Bridge
src/megatron/bridge/training/utils/train_utils.py (`training_log`, `report_memory`); NeMo 2.7.3
nemo/lightning/pytorch/callbacks/progress_printer.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from superpod.errors import counted
from superpod.reports.runs.run_record import Step

NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)"
STEP = re.compile(r"\biteration\s+(\d+)\s*/\s*\d+\s*(\|.*)$")
VALIDATION = re.compile(rf"validation loss at iteration\s+(\d+)\b[^|]*\|\s*lm loss value:\s*({NUMBER})")
BRIDGE = re.compile(rf"Step Time\s*:\s*[\d.]+s GPU utilization:\s*({NUMBER})\s*MODEL_TFLOP/s/GPU")
SAVED = re.compile(r"successfully saved checkpoint (?:from|at) iteration")
SAVE_TIME = re.compile(r"\bsave-checkpoint(?: \.+)?:\s*\([\d.]+, ([\d.]+)\)")
"""in ms, of the slowest rank"""
MEMORY = re.compile(r"\(after \d+ iterations\) memory \((MB|GB)\)(.*)$")
"""preceded by `[Rank 3] `, the rank of the line"""
START = re.compile(
    r"-{6,} arguments -{6,}|using world size: (\d+),"
    r"|All distributed processes registered. Starting with (\d+) processes"
)
ARGUMENT = re.compile(
    r"^\s*(\w+) \.{2,} (\S.*)$"
    r"|^\s*(seq_length|global_batch_size): (\d+)\s*$"
)
"""An argument of Megatron-LM, `name ....... value`, or one of two lines of Megatron-Bridge's YAML configuration."""

MIN_STEP_S, MAX_STEP_S = 1e-4, 86_400.0
"""Shortest and longest plausible step time. Launching the kernels of a step takes longer than the minimum."""
_LOSSES = ("lm loss", "reduced_train_loss", "total loss", "loss")


def parse_fields(text: str) -> dict[str, float]:
    """Return the numeric fields of a line such as `| name: number | name: number`, by name."""
    fields: dict[str, float] = {}
    for part in text.split("|"):
        name, colon, value = part.rpartition(":")
        if colon and re.fullmatch(NUMBER, value.strip(), re.IGNORECASE):
            fields[name.strip()] = float(value)
    return fields


def has_plausible_time(fields: Mapping[str, float]) -> bool:
    """Return whether the step time among the fields of a line is plausible or missing."""
    seconds = _get_step_time_s(fields)
    return seconds is None or MIN_STEP_S <= seconds <= MAX_STEP_S


def describe_left_out(steps: Sequence[str]) -> str:
    """Return a text on the log lines of `steps`, which have implausible step times; "" if there are none."""
    if not steps:
        return ""
    step_list = ", ".join(steps[:3])
    if len(steps) > 3:
        step_list += ", ..."
    lines = counted(len(steps), "line")
    return (
        f"{lines} with an implausible step time (step {step_list}): not within {MIN_STEP_S:g} s to {MAX_STEP_S:,.0f} s"
    )


def _get_step_time_s(fields: Mapping[str, float]) -> float | None:
    milliseconds = fields.get("elapsed time per iteration (ms)")
    return milliseconds / 1000 if milliseconds is not None else fields.get("train_step_timing in s")


def build_step(number: int, attempt: str, fields: Mapping[str, float], tflops: float | None) -> Step:
    """Return a step from the fields of its line; Megatron-Bridge prints `tflops` on a separate line."""
    loss = next((fields[name] for name in _LOSSES if name in fields), None)
    if loss == 0 and fields.get("number of skipped iterations"):
        loss = None  # the mean over zero steps
    return Step(
        number,
        attempt,
        loss=finite_or_none(loss),
        bad_loss=loss is not None and not math.isfinite(loss),
        lr=finite_or_none(fields.get("learning rate", fields.get("lr"))),
        grad_norm=finite_or_none(fields.get("grad norm", fields.get("grad_norm"))),
        seconds=_get_step_time_s(fields),
        tokens=fields.get("consumed samples", fields.get("consumed_samples")),
        tflops=fields.get("throughput per GPU (TFLOP/s/GPU)", tflops) or None,
    )


def parse_peak_gib(unit: str, text: str) -> float | None:
    """Return the peak of allocated memory in a line, in GiB; `unit` is MB (MiB of Megatron-LM) or GB (10^9 bytes)."""
    fields = parse_fields(text)
    if unit == "MB":
        return fields["max allocated"] / 1024 if "max allocated" in fields else None
    peaks = [value for name, value in fields.items() if "max-allocated" in name or name.startswith("peak_allocated")]
    return peaks[0] * 1e9 / 2**30 if peaks else None


def estimate_batch(steps: Sequence[Step]) -> int | None:
    """Return the global batch size, estimated from the consumed samples in `Step.tokens`; None if unknown."""
    sizes = [
        (after.tokens - before.tokens) / (after.step - before.step)
        for before, after in pairwise(steps)
        if before.tokens and after.tokens and after.step > before.step
    ]
    if not sizes or median(sizes) < 1:
        return None
    return round(median(sizes))


def finite_or_none(value: float | None) -> float | None:
    """Return the value, or None for nan and inf."""
    return value if value is not None and math.isfinite(value) else None
