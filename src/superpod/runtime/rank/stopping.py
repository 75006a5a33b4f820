"""Stop a distributed training between two steps, on all ranks at the same step."""

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

LOOK_S = 30.0
"""Seconds between two looks of rank 0 at the time limit, which may have been changed."""


class StopSignals:
    """Notes a stop signal; the training looks at the note after each step.

    The handlers replace Lightning's: its SIGTERM handler raises on the rank that got the signal, wherever the others
    are, and its SIGUSR1 handler requeues the Slurm job by itself. Repeats are ignored: torchrun passes a signal on that
    the terminal has already sent to the whole process group.
    """

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def remember(self) -> None:
        """Note the handlers that `restore` puts back. Call it before Lightning installs its own."""
        self._before = {number: signal.getsignal(number) for number in SIGNALS}

    def install(self) -> None:
        """Take over SIGTERM, SIGINT and SIGUSR1; does nothing outside the main thread, where Python forbids it."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._note)

    def restore(self) -> None:
        """Put the remembered handlers back."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number

    def note(self, number: int) -> None:
        """Note a signal that did not come: the deadline's."""
        self._note(number, None)

    def on_any_rank(self) -> int:
        """A signal that any rank has got, the same number on every rank; 0 = none. A collective: call it on all."""
        import torch
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return self.received
        device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else "cpu"
        flag = torch.tensor([self.received], dtype=torch.int32, device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return int(flag.item())


class Deadline:
    """When to begin the last save before a time limit: early enough for the longest save seen, and a step more.

    Only rank 0 decides: the others hear of it by `StopSignals.on_any_rank`, and none of them reads a file for it.
    """

    def __init__(self, at: float, save_s: float, attempt: Path | None = None) -> None:
        self._at, self._save_s, self._attempt = at, save_s, attempt
        self._next_look = 0.0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Deadline:
        """From SUPERPOD_DEADLINE (Unix time, 0 = none), SUPERPOD_SAVE_S (seconds) and the attempt's folder."""
        save_s = float(environ.get("SUPERPOD_SAVE_S") or 0)
        if environ.get("RANK", "0") != "0":
            return cls(0.0, save_s)
        run, name = environ.get("SUPERPOD_RUN_DIR"), environ.get("SUPERPOD_ATTEMPT")
        attempt = Path(run, "attempts", name) if run and name else None
        return cls(float(environ.get("SUPERPOD_DEADLINE") or 0), save_s, attempt)

    def save_took(self, seconds: float) -> None:
        """Take note of a measured save: from now on, leave twice that."""
        self._save_s = max(self._save_s, 2 * seconds)

    def is_near(self, step_s: float) -> bool:
        """True when another step of `step_s` would leave too little time to save."""
        if time.monotonic() >= self._next_look:
            self._look()
        if not self._comes_within(step_s):
            return False
        self._look()  # it may have been extended a moment ago
        return self._comes_within(step_s)

    def _comes_within(self, step_s: float) -> bool:
        return bool(self._at) and time.time() + self._save_s + 2 * step_s > self._at

    def _look(self) -> None:
        """Take up the limit as the first node has last read it from Slurm."""
        self._next_look = time.monotonic() + LOOK_S
        at = time_limit.read(self._attempt) if self._attempt else None
        self._at = self._at if at is None else at


def save_last(trainer: Trainer) -> bool:
    """Save the `-last` checkpoint now, unless this step is saved already. True when one stands for this step.

    The same two calls as NeMo's PreemptionCallback makes. That callback itself is not used: it listens on rank 0 only,
    needs a CUDA device, and leaves by `sys.exit`, so that neither the end hooks nor the loggers run.
    """
    callbacks: list[Any] = [*trainer.checkpoint_callbacks]  # NeMo's; Lightning's base class has no `save_last`
    for callback in callbacks:
        if not getattr(callback, "save_last", None):
            continue
        if getattr(callback, "_last_global_step_saved", 0) != trainer.global_step:
            callback._save_last_checkpoint(trainer, callback._monitor_candidates(trainer))
        return True
    return False
