"""Run PyTorch's profiler on selected ranks, with output in RUN/profile.

The profiler is NeMo's callback (`profiling.py`), which would run on every rank and write to the current folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

from superpod.common.json_files import read_json

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

FOLDER = "profile"
"""Folder in the run folder with the profiles, which `profiles/profile_files.py` searches."""
PROFILER = "PytorchProfilerCallback"
"""NeMo's class in the configuration of a recipe."""


class ProfiledRanks(Callback):
    """Forwards the hooks of training steps to a profiler callback on `ranks`; does nothing on other ranks.

    If training ends before the last profiled step, or is resumed after the first one, no profile is written.

    Args:
        make: creates the callback from `trace_dir`, the folder of the profile (RUN/profile/rank-N).
        ranks: the ranks to profile.
        run_dir: the run folder; "" = the value of SUPERPOD_RUN_DIR.
    """

    def __init__(self, make: Callable[..., Callback], ranks: list[int], run_dir: str = "") -> None:
        super().__init__()
        self.make, self.ranks = make, ranks
        self.run_dir = run_dir or os.environ.get("SUPERPOD_RUN_DIR", "")
        self._inner: Callback | None = None

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Create the profiler of this rank, if it is selected."""
        if trainer.global_rank in self.ranks and self._inner is None:
            folder = Path(self.run_dir) / FOLDER / f"rank-{trainer.global_rank}"
            folder.mkdir(parents=True, exist_ok=True)
            self._inner = self.make(trace_dir=str(folder))

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start the profiler at the first profiled step."""
        if self._inner:
            self._inner.on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop the profiler after the last profiled step, and write the profile."""
        if self._inner:
            self._inner.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


def select_ranks(callbacks: list[Any], run: Path, profile: str = "") -> list[Any]:
    """Return the callback configurations with NeMo's profiler limited to the requested ranks, with output in `run`.

    `profile` has the format of requests/profile_request.py; "" = the value in run.json. If the run requests no profile,
    a profiler in the recipe is left unchanged.
    """
    if not profile:
        profile = str((read_json(run / "run.json") or {}).get("profile", ""))
    parts = profile.split(":")
    ranks = [int(rank) for rank in parts[-1].split(",") if rank.isdecimal()]
    if parts[0] != "torch" or not ranks:
        return callbacks
    import fiddle as fdl
    import nemo_run

    selected = []
    for config in callbacks:
        if getattr(getattr(config, "__fn_or_cls__", None), "__name__", "") == PROFILER:
            make = fdl.cast(nemo_run.Partial, config)
            config = nemo_run.Config(ProfiledRanks, make=make, ranks=ranks, run_dir=str(run))
        selected.append(config)
    return selected
