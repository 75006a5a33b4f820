"""Records loss, time and memory of each training step on a GPU.

Imports Lightning: nemo_run builds `StepRecorder` from the recipe's callbacks.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from superpod.common.json_files import json_number, write_json
from superpod.planner.hardware import GIB


class StepRecord:
    """Measurements of training steps. `finish` writes the file after each step, so that an error loses none.

    Args:
        path: the JSON file: {"losses": [...], "grad_norms": [...], "seconds": [...], "allocated_gib": [...],
            "reserved_gib": [...], "parameters": N}, with one value per step. Memory is the peak during the step; NaN
            and infinity are null.
        parameters: number of the model's parameters.
    """

    def __init__(self, path: Path, parameters: int) -> None:
        self.path, self.started = path, 0.0
        self.values: dict[str, Any] = {
            "parameters": parameters,
            "losses": [],
            "grad_norms": [],
            "seconds": [],
            "allocated_gib": [],
            "reserved_gib": [],
        }

    def start(self) -> None:
        """Wait until the GPU is idle, and start to measure a step."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.started = time.perf_counter()

    def finish(self, loss: float, grad_norm: float | None) -> None:
        """Wait until the GPU has finished the step, and write its measurements.

        Args:
            loss: loss of the step.
            grad_norm: gradient norm before clipping; None if the optimizer reports none.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self.values["allocated_gib"].append(torch.cuda.max_memory_allocated() / GIB)
            self.values["reserved_gib"].append(torch.cuda.max_memory_reserved() / GIB)
        self.values["seconds"].append(time.perf_counter() - self.started)
        self.values["losses"].append(json_number(loss))
        if grad_norm is not None:
            self.values["grad_norms"].append(json_number(grad_norm))
        write_json(self.path, self.values)


class StepRecorder(pl.Callback):
    """Records the steps of NeMo's trainer.

    Args:
        path: the file of the `StepRecord`.
        profile_step: number of the step, from 1, whose kernels are written to `kernels.json`; 0 = none.
    """

    def __init__(self, path: str, profile_step: int = 0) -> None:
        self.path, self.profile_step = Path(path), profile_step
        self.profiler: torch.profiler.profile | None = None
        self.record: StepRecord | None = None

    def on_train_batch_start(self, trainer: Any, *_: object) -> None:
        """Start to measure a step, and to profile it if it is `profile_step`."""
        if self.record is None:
            model = trainer.strategy.megatron_parallel
            self.record = StepRecord(self.path, sum(p.numel() for p in model.parameters()))
        if len(self.record.values["losses"]) + 1 == self.profile_step:
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        self.record.start()

    def on_train_batch_end(self, trainer: Any, *_: object) -> None:
        """Record the step, and write its kernels if it was profiled."""
        metrics = trainer.callback_metrics
        norm = float(metrics["grad_norm"]) if "grad_norm" in metrics else None
        assert self.record is not None
        self.record.finish(float(metrics["reduced_train_loss"]), norm)
        if self.profiler is not None:
            self.profiler.stop()
            write_kernels(self.profiler, self.path.with_name("kernels.json"))
            self.profiler = None


def write_kernels(profiler: torch.profiler.profile, path: Path) -> None:
    """Write the CUDA kernels of a profile as {"kernels": [[name, calls, microseconds], ...]}, the longest first."""
    kernels = [
        [event.key, event.count, round(event.self_device_time_total, 1)]
        for event in profiler.key_averages()
        if event.self_device_time_total and event.device_type.name == "CUDA"
    ]
    write_json(path, {"kernels": sorted(kernels, key=lambda kernel: -kernel[2])})
