"""What speaks against running a recipe on this machine, as far as it is known before NeMo is imported (20 s)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.requests.request import Request

PROCESS_GIB = 0.8
"""What NeMo takes in a process before there is a model."""
TRAINING_BYTES, FROZEN_BYTES = 18, 2
"""Of a parameter: in training, weight 2, gradient 4, main weight 4, two moments 8; under an adapter, its weight."""

_SIZES = ("model.", "peft", "trainer.devices", "trainer.num_nodes", "trainer.strategy", "with")
"""Overrides that may change how large a run is."""


def may_have_gpu() -> bool:
    """Whether this machine may have an NVIDIA GPU: the driver's device files, or WSL's, without importing torch."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def refuse(request: Request) -> None:
    """Refuse a rehearsal at full size that this machine cannot hold, by the planner's parameters: one copy of them.

    A request with overrides of the model or the layout may be smaller; it is judged once it is built (`local.prepare`).

    Raises:
        UserError: with the memory that it takes at least, and what is free.
    """
    if any(text.startswith(_SIZES) for text in request.overrides) or may_have_gpu():
        return
    import psutil

    job = request.job()
    parameter_bytes = FROZEN_BYTES if job.task == "lora" else TRAINING_BYTES
    need = job.gpus * PROCESS_GIB + job.model.total_parameters() * parameter_bytes / 2**30
    ranks, have = job.gpus, psutil.virtual_memory().available / 2**30
    if need > have:
        size = f" --nodes {request.num_nodes}" if request.num_nodes else ""
        raise UserError(
            f"this machine has no GPU, and rehearsing {request.recipe} on CPUs at its own size takes {ranks} processes "
            f"and at least {need:,.0f} GiB; {have:.0f} GiB are free",
            f"`recipes rehearse {request.recipe}{size}` shrinks it to what this machine holds; or run it where its "
            "GPUs are",
        )
