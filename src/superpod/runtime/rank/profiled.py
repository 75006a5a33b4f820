"""PyTorch's profiler on some ranks of a run, into RUN/profile.

The profiler is NeMo's callback (`profiling.py`), which would run on every rank and write where it is started.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

from superpod.common.files import read_json

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

FOLDER = "profile"
"""In RUN. `profiles/profile_files.py` finds what lies in it."""
PROFILER = "PytorchProfilerCallback"
"""NeMo's class, as a recipe configures it."""


class ProfiledRanks(Callback):
    """Hands the hooks of a training step to the callback that `make` gives, on `ranks` alone; others do nothing.

    `make` takes `trace_dir`, the folder of the rank's profile: RUN/profile/rank-N. `run_dir` says where RUN is; an
    empty one is taken from SUPERPOD_RUN_DIR. A training that ends before the last of the steps, or goes on after the
    first, leaves no profile.
    """

    def __init__(self, make: Callable[..., Callback], ranks: list[int], run_dir: str = "") -> None:
        super().__init__()
        self.make, self.ranks = make, ranks
        self.run_dir = run_dir or os.environ.get("SUPERPOD_RUN_DIR", "")
        self._inner: Callback | None = None

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Make the profiler of this rank, if it is to have one."""
        if trainer.global_rank in self.ranks and self._inner is None:
            folder = Path(self.run_dir) / FOLDER / f"rank-{trainer.global_rank}"
            folder.mkdir(parents=True, exist_ok=True)
            self._inner = self.make(trace_dir=str(folder))

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin, at the first of the steps."""
        if self._inner:
            self._inner.on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End, after the last of the steps, and write the profile."""
        if self._inner:
            self._inner.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


def keep(callbacks: list[Any], run: Path, profile: str = "") -> list[Any]:
    """The configurations of callbacks, with NeMo's profiler on the ranks that were asked for, and in the run's folder.

    `profile` is as requests/profile_request.py writes it; "" = that of run.json. A profiler of the recipe's own, in a
    run that asked for none, is left as it is.
    """
    words = (profile or str((read_json(run / "run.json") or {}).get("profile", ""))).split(":")
    ranks = [int(rank) for rank in words[-1].split(",") if rank.isdecimal()]
    if words[0] != "torch" or not ranks:
        return callbacks
    return [_on_ranks(config, ranks, run) if _class_of(config) == PROFILER else config for config in callbacks]


def _class_of(config: Any) -> str:
    return getattr(getattr(config, "__fn_or_cls__", None), "__name__", "")


def _on_ranks(config: Any, ranks: list[int], run: Path) -> Any:
    import fiddle as fdl
    import nemo_run

    return nemo_run.Config(ProfiledRanks, make=fdl.cast(nemo_run.Partial, config), ranks=ranks, run_dir=str(run))
