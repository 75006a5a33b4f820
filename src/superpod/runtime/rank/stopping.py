"""Stop a distributed training on all ranks after the same step."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from superpod.runtime.attempts import time_limit

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

UPDATE_S = 30.0
"""Seconds after which rank 0 reads the time limit of the job again, which may have changed."""


class StopSignals:
    """Records a stop signal, for which the training checks after each step; `received` is its number, 0 = none.

    The handlers replace those of Lightning: its SIGTERM handler raises an exception on the rank that received the
    signal regardless of the other ranks, and its SIGUSR1 handler requeues the Slurm job. Repeated signals are ignored,
    since torchrun forwards signals that the terminal has already sent to the process group.
    """

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def remember(self) -> None:
        """Store the current handlers for `restore`. Call it before Lightning installs its own."""
        self._before = {number: signal.getsignal(number) for number in SIGNALS}

    def install(self) -> None:
        """Install handlers for SIGTERM, SIGINT and SIGUSR1, except outside the main thread, where Python forbids it."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self.record)

    def restore(self) -> None:
        """Restore the stored handlers."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def record(self, number: int, frame: FrameType | None = None) -> None:
        """Record the signal `number`, unless one is already recorded. This is the handler of the signals."""
        self.received = self.received or number

    def received_by_any_rank(self) -> int:
        """Return the number of a signal that any rank has received, equal on all ranks; 0 = none. A collective."""
        import torch
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return self.received
        device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else "cpu"
        flag = torch.tensor([self.received], dtype=torch.int32, device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return int(flag.item())


class Deadline:
    """Decides when to start the last save before a time limit: early enough for the longest save so far plus one step.

    Only rank 0 decides. The other ranks read no file; `StopSignals.received_by_any_rank` tells them. `at` is the Unix
    time at which the limit expires, 0 = no limit; `save_s` are the seconds to reserve for the save; a changed limit is
    read from the folder `attempt`, if it is given.
    """

    def __init__(self, at: float, save_s: float, attempt: Path | None = None) -> None:
        self._at, self._save_s, self._attempt = at, save_s, attempt
        self._next_update = 0.0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Deadline:
        """Create a deadline from SUPERPOD_DEADLINE, SUPERPOD_SAVE_S, SUPERPOD_RUN_DIR and SUPERPOD_ATTEMPT."""
        save_s = float(environ.get("SUPERPOD_SAVE_S") or 0)
        if environ.get("RANK", "0") != "0":
            return cls(0.0, save_s)
        run, name = environ.get("SUPERPOD_RUN_DIR"), environ.get("SUPERPOD_ATTEMPT")
        attempt = Path(run, "attempts", name) if run and name else None
        return cls(float(environ.get("SUPERPOD_DEADLINE") or 0), save_s, attempt)

    def record_save(self, seconds: float) -> None:
        """Record the duration of a save; from now on, at least twice as much is reserved."""
        self._save_s = max(self._save_s, 2 * seconds)

    def is_near(self, step_s: float) -> bool:
        """Return whether another step of `step_s` seconds would leave too little time to save."""
        if time.monotonic() >= self._next_update:
            self._update()
        if not self._leaves_too_little(step_s):
            return False
        self._update()  # the limit may just have been extended
        return self._leaves_too_little(step_s)

    def _leaves_too_little(self, step_s: float) -> bool:
        return bool(self._at) and time.time() + self._save_s + 2 * step_s > self._at

    def _update(self) -> None:
        """Read the limit that the first node last received from Slurm."""
        self._next_update = time.monotonic() + UPDATE_S
        end_time = time_limit.read(self._attempt) if self._attempt else None
        if end_time is not None:
            self._at = end_time


def save_last(trainer: Trainer) -> bool:
    """Save the `-last` checkpoint, unless that of this step is saved; return False if the recipe saves none.

    This makes the same two calls as NeMo's PreemptionCallback. The callback itself is not used: it handles signals only
    on rank 0, needs a CUDA device, and exits with `sys.exit`, so that neither the end hooks nor the loggers run.
    """
    callbacks: list[Any] = [*trainer.checkpoint_callbacks]  # NeMo's class; Lightning's base class has no `save_last`
    for callback in callbacks:
        if not getattr(callback, "save_last", None):
            continue
        if getattr(callback, "_last_global_step_saved", 0) != trainer.global_step:
            callback._save_last_checkpoint(trainer, callback._monitor_candidates(trainer))
        return True
    return False
