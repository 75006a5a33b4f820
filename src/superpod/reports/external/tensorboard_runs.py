"""Reads runs from TensorBoard event files with the tags of NeMo, Megatron-LM or Megatron-Bridge.

The tags of NeMo come from its `self.log` calls and Lightning's logger, with steps from 0; those of Megatron come from
`training_log` (see `log_fields`), with steps from 1.
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
from superpod.reports.runs.run_record import Record, Span, Step, merge_reports

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
"""Field of a step -> tags in order of preference."""
FROM_ZERO = ("reduced_train_loss", "train_step_timing in s", "global_step")
"""Tags of NeMo, which counts steps from 0."""
PEAK = "mem-max-allocated-bytes"

Scalars = Mapping[str, Sequence[Any]]
"""Scalar events of TensorBoard by tag."""


def read_run(path: Path, files: Sequence[Path], gpu: str = "") -> Record:
    """Read a run from its event files, each of which is an attempt.

    Args:
        path: the file, or the folder that contains the files.
        files: the event files.
        gpu: type of its GPUs; "" if unknown.

    Raises:
        UserError: TensorBoard is not installed, the files contain no step, or the GPU is unknown.
    """
    from importlib.util import find_spec

    if find_spec("tensorboard") is None:
        raise UserError(f"{path}: reading TensorBoard files needs tensorboard, which is not installed", INSTALL)
    scalars_by_file = [scalars for scalars in map(_read_scalars, files) if scalars]
    scalars_by_file.sort(key=lambda scalars: min(event.wall_time for events in scalars.values() for event in events))

    left_out: list[str] = []
    runs = [(scalars, list(_read_steps(scalars, left_out))) for scalars in scalars_by_file]
    runs = [(scalars, steps) for scalars, steps in runs if steps]
    if left_out and not runs:
        raise UserError(f"{path}: {log_fields.describe_left_out(left_out)}", "the files contain no other steps")
    if not runs:
        tags = ", ".join(TAGS["loss"])
        raise UserError(f"{path} contains no training step", f"reports need TensorBoard tags such as {tags}")

    reports, spans = [], []
    for number, (scalars, in_file) in enumerate(runs, 1):
        name = f"{number:03d}"
        reports += [replace(step, attempt=name) for step in in_file]
        spans.append(_build_span(name, scalars, in_file))
    steps, repeated = merge_reports(reports)
    peaks = [event.value for scalars in scalars_by_file for event in scalars.get(PEAK, ())]
    sizes = [event.value for scalars in scalars_by_file for event in scalars.get("world-size", ())]
    is_nemo = any(tag in scalars for scalars in scalars_by_file for tag in FROM_ZERO)
    return Record(
        name=path.name if path.is_dir() else path.parent.name,
        path=path,
        source=f"TensorBoard files of {'NeMo' if is_nemo else 'Megatron'}",
        steps=steps,
        repeated=repeated,
        spans=tuple(spans),
        gpu=hardware.node(gpu).gpu.name if gpu else "",
        gpus=round(sizes[-1]) if sizes else None,
        unplanned="TensorBoard files do not contain the model and the GPU",
        left_out=log_fields.describe_left_out(left_out),
        peak_gib=max(peaks) / 2**30 if peaks else None,
    )


def _read_scalars(file: Path) -> Scalars:
    """Return the scalar events of a file by tag; {} if the file is corrupt or not an event file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    kept_events = {"scalars": 0, "tensors": 1, "images": 1, "audio": 1, "histograms": 1, "compressedHistograms": 1}
    events = EventAccumulator(str(file), size_guidance=kept_events)
    try:
        events.Reload()
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}", "specify files that you have permission to read") from error
    scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    return {tag: values for tag, values in scalars.items() if values}


def _read_steps(scalars: Scalars, left_out: list[str]) -> Iterator[Step]:
    """Yield the steps of a file; append the numbers of steps with an implausible step time to `left_out`."""
    tags = {}
    for name, known in TAGS.items():
        present_tags = [tag for tag in known if tag in scalars]
        if present_tags:
            tags[name] = present_tags[0]
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
        step_values = values[number]
        if not log_fields.MIN_STEP_S <= step_values.get("seconds", 1.0) <= log_fields.MAX_STEP_S:
            left_out.append(str(number))
            continue
        fields = {name: float(value) for name, value in step_values.items() if math.isfinite(value)}
        yield replace(Step(number, bad_loss="loss" in step_values and "loss" not in fields), **fields)


def _build_span(name: str, scalars: Scalars, steps: Sequence[Step]) -> Span:
    """Return an attempt from the start of its first step to its last event; the time before that is unknown."""
    first = next((step for step in steps if step.t is not None), None)
    began = first.t - (first.seconds or 0.0) if first and first.t else None
    last = max(event.wall_time for events in scalars.values() for event in events)
    return Span(name, began, last)
