"""Exports runs in the text format of Prometheus, for the textfile collector of node_exporter.

Names and units follow the conventions of Prometheus (https://prometheus.io/docs/practices/naming/): a common prefix,
base units, `_ratio` for fractions, Unix times instead of ages, and one series per state with the value 0 or 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.common import output_file
from superpod.errors import UserError
from superpod.runtime.runs.run_state import State

if TYPE_CHECKING:
    from superpod.slurm.status.run_views import RunView

Value = float | int | None
NAME = "superpod_run"
"""Prefix of all series."""

FIGURES: tuple[tuple[str, str, Callable[[RunView, float], Value]], ...] = (
    ("step", "Latest optimizer step of the run.", lambda view, now: view.step),
    ("max_steps", "Step at which the run is done.", lambda view, now: view.max_steps),
    ("loss_nats", "Latest training loss, nats per token.", lambda view, now: view.loss),
    (
        "tokens_per_second",
        "Tokens per second over all GPUs, median of the last steps.",
        lambda v, now: v.tokens_per_s,
    ),
    ("mfu_ratio", "Model FLOPs utilization, 0 to 1.", lambda view, now: view.mfu),
    (
        "remaining_seconds",
        "Time left at the current speed, without time in the queue.",
        lambda view, now: view.eta_s,
    ),
    ("checkpoint_step", "Step of the newest complete checkpoint; 0 = none.", lambda view, now: view.checkpoint_step),
    (
        "checkpoint_timestamp_seconds",
        "Unix time of the newest checkpoint.",
        lambda view, now: None if view.checkpoint_age_s is None else now - view.checkpoint_age_s,
    ),
    ("attempts", "Attempts so far.", lambda view, now: view.attempts),
    (
        "jobs",
        "Pending and running jobs; absent if Slurm does not answer.",
        lambda view, now: None if view.jobs is None else len(view.jobs),
    ),
    ("slow", "1 if the run's steps have become slower, else 0.", lambda view, now: int(bool(view.alarm))),
)
"""Name without prefix, help text and value of each gauge; None = no sample."""


def render(views: Sequence[RunView], now: float | None = None) -> str:
    """Return the samples of runs in the text format, labelled with run (folder name), recipe and user."""
    now = now or time.time()
    states = [
        f'{NAME}_state{{{_labels(view)},state="{state}"}} {int(view.state == state)}'
        for view in views
        for state in State
    ]
    blocks = [_block("state", "1 for the current state of the run, 0 for the others.", states)]
    for name, meaning, value in FIGURES:
        samples = [(view, value(view, now)) for view in views if view.state is not State.UNREADABLE]
        lines = [
            f"{NAME}_{name}{{{_labels(view)}}} {x if isinstance(x, int) else f'{x:.9g}'}"
            for view, x in samples
            if x is not None
        ]
        blocks.append(_block(name, meaning, lines))
    return "".join(blocks)


def write(path: Path, views: Sequence[RunView]) -> None:
    """Write the samples of runs to `path`, atomically and with mode 0644, because node_exporter runs as another user.

    Raises:
        UserError: `path` does not end in .prom, was written by another program, or cannot be written.
    """
    if path.suffix != ".prom":
        raise UserError(f"--prometheus {path}: node_exporter reads only files that end in .prom", f"use {path}.prom")
    head = f"# HELP {NAME}_".encode()
    output_file.check(path, "--prometheus", lambda start, _: start.startswith(head), by="recipes status")
    output_file.write(path, render(views), "--prometheus", permissions=0o644)


def _block(name: str, meaning: str, lines: list[str]) -> str:
    """Return the HELP and TYPE lines of a gauge, followed by its samples."""
    head = [f"# HELP {NAME}_{name} {meaning}", f"# TYPE {NAME}_{name} gauge"]
    return "".join(f"{line}\n" for line in [*head, *lines])


def _labels(view: RunView) -> str:
    labels = {"run": view.run.path.name, "recipe": view.run.recipe, "user": view.user}
    return ",".join(f'{name}="{_escape_label(value)}"' for name, value in labels.items())


def _escape_label(value: str) -> str:
    """Escape backslashes, quotes and line breaks in a label value; replace bytes that are not valid UTF-8."""
    valid_text = value.encode("utf-8", "replace").decode()
    return valid_text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
