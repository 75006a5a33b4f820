"""Records loss, time and memory of each training step on a GPU.

Imports Lightning: nemo_run builds `StepRecorder` from the recipe's callbacks.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

GIB = 2**30


class StepRecorder(pl.Callback):
    """Writes the measured steps to a JSON file after every step, so that those before an error are kept.

    Args:
        path: the file: {"losses": [...], "grad_norms": [...], "seconds": [...], "allocated_gib": [...],
            "reserved_gib": [...], "parameters": N}, with one value per step. Memory is the peak during the step.
        profile_step: number of the step, from 1, whose kernels are written to `kernels.json`; 0 = none.
    """

    def __init__(self, path: str, profile_step: int = 0) -> None:
        self.path, self.profile_step = Path(path), profile_step
        self.profiler: torch.profiler.profile | None = None
        self.record: dict[str, Any] = {
            "losses": [],
            "grad_norms": [],
            "seconds": [],
            "allocated_gib": [],
            "reserved_gib": [],
        }
        self.started = 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: pl.LightningModule, *_: object) -> None:
        """Start the clock when the GPU has nothing left to do."""
        if "parameters" not in self.record:
            self.record["parameters"] = sum(p.numel() for p in trainer.strategy.megatron_parallel.parameters())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        if len(self.record["losses"]) + 1 == self.profile_step:
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        self.started = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, *_: object) -> None:
        """Record the step when the GPU has finished it."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self.record["allocated_gib"].append(torch.cuda.max_memory_allocated() / GIB)
            self.record["reserved_gib"].append(torch.cuda.max_memory_reserved() / GIB)
        self.record["seconds"].append(time.perf_counter() - self.started)
        if self.profiler is not None:
            self.profiler.stop()
            write_kernels(self.profiler, self.path.with_name("kernels.json"))
            self.profiler = None
        metrics = trainer.callback_metrics
        self.record["losses"].append(float(metrics["reduced_train_loss"]))
        if "grad_norm" in metrics:
            self.record["grad_norms"].append(float(metrics["grad_norm"]))
        self.path.write_text(json.dumps(self.record))


def write_kernels(profiler: torch.profiler.profile, path: Path) -> None:
    """Write [[kernel, calls, microseconds], ...], the longest first."""
    kernels = [
        [event.key, event.count, round(event.self_device_time_total, 1)]
        for event in profiler.key_averages()
        if event.self_device_time_total and event.device_type.name == "CUDA"
    ]
    path.write_text(json.dumps(sorted(kernels, key=lambda kernel: -kernel[2])))
