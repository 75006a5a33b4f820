"""The lines of Megatron-LM, Megatron-Bridge and NeMo that a report reads, and what stands in them.

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
"""ms: the slowest rank's."""
MEMORY = re.compile(r"\(after \d+ iterations\) memory \((MB|GB)\)(.*)$")
"""Behind `[Rank 3] `, which is taken for the line's rank."""
START = re.compile(
    r"-{6,} arguments -{6,}|using world size: (\d+),"
    r"|All distributed processes registered. Starting with (\d+) processes"
)
ARGUMENT = re.compile(
    r"^\s*(\w+) \.{2,} (\S.*)$"
    r"|^\s*(seq_length|global_batch_size): (\d+)\s*$"
)
"""Megatron-LM's arguments, `name ....... value`; of Megatron-Bridge's configuration, YAML, those that matter."""

LEAST_S, MOST_S = 1e-4, 86_400.0
"""Seconds that a step takes at least, which is less than a GPU needs to start its kernels, and at most."""
_LOSSES = ("lm loss", "reduced_train_loss", "total loss", "loss")


def parse_fields(text: str) -> dict[str, float]:
    """The fields of a line, `| name: number | name: number`, by name; what is no number is left out."""
    fields: dict[str, float] = {}
    for part in text.split("|"):
        name, colon, value = part.rpartition(":")
        if colon and re.fullmatch(NUMBER, value.strip(), re.IGNORECASE):
            fields[name.strip()] = float(value)
    return fields


def has_sane_time(fields: Mapping[str, float]) -> bool:
    """Whether a step's line has a time that a step can take, or none."""
    seconds = _seconds(fields)
    return seconds is None or LEAST_S <= seconds <= MOST_S


def describe_left_out(steps: Sequence[str]) -> str:
    """That so many steps are left out for the times that their lines name; '' of none."""
    if not steps:
        return ""
    which = ", ".join(steps[:3]) + ", ..." * (len(steps) > 3)
    limits = f"no step takes less than {LEAST_S:g} s, or more than {MOST_S:,.0f}"
    return f"{counted(len(steps), 'line')} with a time that is none (step {which}): {limits}"


def _seconds(fields: Mapping[str, float]) -> float | None:
    milliseconds = fields.get("elapsed time per iteration (ms)")
    return milliseconds / 1000 if milliseconds is not None else fields.get("train_step_timing in s")


def build_step(number: int, attempt: str, fields: Mapping[str, float], tflops: float | None = None) -> Step:
    """A step of such fields; `tflops` are those of a line of their own, as Megatron-Bridge prints them."""
    loss = next((fields[name] for name in _LOSSES if name in fields), None)
    if loss == 0 and fields.get("number of skipped iterations"):
        loss = None  # the mean over no step that counted
    return Step(
        number,
        attempt,
        loss=finite_or_none(loss),
        bad_loss=loss is not None and not math.isfinite(loss),
        lr=finite_or_none(fields.get("learning rate", fields.get("lr"))),
        grad_norm=finite_or_none(fields.get("grad norm", fields.get("grad_norm"))),
        seconds=_seconds(fields),
        tokens=fields.get("consumed samples", fields.get("consumed_samples")),
        tflops=fields.get("throughput per GPU (TFLOP/s/GPU)", tflops) or None,
    )


def parse_peak_gib(unit: str, text: str) -> float | None:
    """The peak in a line of memory: Megatron-LM's `max allocated`, in MiB; Megatron-Bridge's, in GB."""
    fields = parse_fields(text)
    if unit == "MB":
        return fields["max allocated"] / 1024 if "max allocated" in fields else None
    gigabytes = next((v for k, v in fields.items() if "max-allocated" in k or k.startswith("peak_allocated")), None)
    return gigabytes * 1e9 / 2**30 if gigabytes is not None else None


def estimate_batch(steps: Sequence[Step]) -> int | None:
    """The global batch, from samples seen after one step and the next; `tokens` are still samples here."""
    pairs = [(a, b) for a, b in pairwise(steps) if a.tokens and b.tokens and b.step > a.step]
    sizes = [(b.tokens - a.tokens) / (b.step - a.step) for a, b in pairs if a.tokens and b.tokens]
    return round(median(sizes)) if sizes and median(sizes) >= 1 else None


def finite_or_none(value: float | None) -> float | None:
    """The value; None for one that is no number, which no figure holds."""
    return value if value is not None and math.isfinite(value) else None
