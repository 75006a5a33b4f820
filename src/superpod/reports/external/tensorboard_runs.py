"""Runs that left event files of TensorBoard: NeMo's, Megatron-LM's and Megatron-Bridge's names of what they log.

NeMo's tags are those of its `self.log` calls and of Lightning's logger, counted from 0; Megatron's are those of
`training_log` (see `log_fields`), counted from 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from superpod.errors import UserError
from superpod.planner import hardware
from superpod.reports.external import log_fields
from superpod.reports.runs.run_record import Record, Span, Step, merged

INSTALL = "pip install -c constraints.txt tensorboard"
TAGS = {
    "loss": ("reduced_train_loss", "lm loss", "train_loss", "loss"),
    "val_loss": ("val_loss", "lm loss validation"),
    "lr": ("lr", "learning-rate"),
    "grad_norm": ("grad_norm", "grad-norm"),
    "seconds": ("train_step_timing in s", "iteration-time"),
    "tflops": ("throughput", "throughput/tflops/device", "tflops_per_sec_per_gpu"),
    "rate": ("tokens_per_sec_per_gpu", "throughput/device/tokens_per_sec"),
}
"""What a report shows -> the tags that hold it; the first that is there counts."""
FROM_ZERO = ("reduced_train_loss", "train_step_timing in s", "global_step")
"""Tags of NeMo, whose steps count from 0."""
PEAK = ("mem-max-allocated-bytes",)


def read_run(path: Path, files: Sequence[Path], gpu: str = "") -> Record:
    """The run of event `files`, all those below `path` or it itself: each file is an attempt.

    Raises:
        UserError: TensorBoard is not installed, the files hold no step, or there is no such GPU.
    """
    from importlib.util import find_spec

    if find_spec("tensorboard") is None:
        raise UserError(f"{path} is TensorBoard's, which is not installed", INSTALL)
    read = [scalars for file in files if (scalars := _scalars(file))]
    read.sort(key=lambda scalars: min(event.wall_time for events in scalars.values() for event in events))
    left_out: list[str] = []
    runs = [(scalars, steps) for scalars in read if (steps := list(_steps(scalars, left_out)))]
    if left_out and not runs:
        raise UserError(
            f"{path}: {log_fields.describe_left_out(left_out)}", "its times are wrong, and nothing is left to report"
        )
    if not runs:
        raise UserError(f"{path} holds no step of a training", f"a report reads {', '.join(TAGS['loss'])} and the like")
    names = [f"{i:03d}" for i in range(1, len(runs) + 1)]
    reports = [replace(step, attempt=name) for name, (_, steps) in zip(names, runs, strict=True) for step in steps]
    steps, repeated = merged(reports)
    peaks = [event.value for scalars in read for tag in PEAK for event in scalars.get(tag, ())]
    sizes = [event.value for scalars in read for event in scalars.get("world-size", ())]
    is_nemo = any(tag in scalars for scalars in read for tag in FROM_ZERO)
    return Record(
        name=path.name if path.is_dir() else path.parent.name,
        path=path,
        source=f"TensorBoard files of {'NeMo' if is_nemo else 'Megatron'}",
        steps=steps,
        repeated=repeated,
        spans=tuple(_span(name, scalars, steps) for name, (scalars, steps) in zip(names, runs, strict=True)),
        gpu=hardware.node(gpu).gpu.name if gpu else "",
        gpus=round(sizes[-1]) if sizes else None,
        unplanned="TensorBoard files name neither model nor GPU",
        left_out=log_fields.describe_left_out(left_out),
        peak_gib=max(peaks) / 2**30 if peaks else None,
    )


def _scalars(file: Path) -> Mapping[str, Sequence[Any]]:
    """Every scalar of a file by its tag; none of one that cannot be read, or that holds something else."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    kept = {"scalars": 0, "tensors": 1, "images": 1, "audio": 1, "histograms": 1, "compressedHistograms": 1}
    events = EventAccumulator(str(file), size_guidance=kept)
    try:
        events.Reload()
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}", "name files that you may read") from error
    return {tag: events.Scalars(tag) for tag in events.Tags()["scalars"] if events.Scalars(tag)}


def _steps(scalars: Mapping[str, Sequence[Any]], left_out: list[str]) -> Iterator[Step]:
    """The steps of a file; those with a time that no step takes are named in `left_out` instead."""
    tags = {name: tag for name, known in TAGS.items() if (tag := next((t for t in known if t in scalars), ""))}
    if "loss" not in tags and "seconds" not in tags:
        return
    first = int(any(tag in scalars for tag in FROM_ZERO))
    values: dict[int, dict[str, float]] = {}
    for name, tag in tags.items():
        for event in scalars[tag]:
            fields = values.setdefault(event.step + first, {})
            fields[name] = event.value
            if name in ("loss", "seconds"):
                fields["t"] = event.wall_time
    for number in sorted(values):
        given = values[number]
        if not log_fields.LEAST_S <= given.get("seconds", 1.0) <= log_fields.MOST_S:
            left_out.append(str(number))
            continue
        fields = {name: float(value) for name, value in given.items() if math.isfinite(value)}
        yield replace(Step(number, bad_loss="loss" in given and "loss" not in fields), **fields)


def _span(name: str, scalars: Mapping[str, Sequence[Any]], steps: Sequence[Step]) -> Span:
    """From the begin of its first step to its last event: what was before the first step is not known."""
    first = next((step for step in steps if step.t is not None), None)
    last = max(event.wall_time for events in scalars.values() for event in events)
    return Span(name, first.t - (first.seconds or 0.0) if first and first.t else None, last)
