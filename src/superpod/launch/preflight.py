"""Refuse, before a run starts, what would end it later. Needs no NeMo, whose import takes 20 s."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.requests.request import Request

LOGS_BYTES = 16 * 2**20
"""What a run writes beside its checkpoints, roughly."""
PROCESS_GIB = 0.8
"""What NeMo takes in a process before there is a model."""
TRAINING_BYTES, FROZEN_BYTES = 18, 2
"""Of a parameter: in training, weight 2, gradient 4, main weight 4, two moments 8; under an adapter, its weight."""

_SIZES = ("model.", "peft", "trainer.devices", "trainer.num_nodes", "trainer.strategy", "with")
"""Overrides that may change how large a run is."""


def may_have_gpu() -> bool:
    """Whether this machine may have an NVIDIA GPU: the driver's device files, or WSL's, without importing torch."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def require_planned_memory(request: Request) -> None:
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


def require_disk_space(folder: Path, checkpoint_bytes: int) -> None:
    """Refuse a run whose folder has no room for two checkpoints: the newest complete one, and the next in the making.

    Raises:
        UserError: with what is needed and what is free.
    """
    need = 2 * checkpoint_bytes + LOGS_BYTES
    free = shutil.disk_usage(folder).free
    if free < need:
        raise UserError(
            f"two checkpoints of {checkpoint_bytes / 2**20:,.0f} MiB and logs need {need / 2**20:,.0f} MiB, and "
            f"{free / 2**20:,.0f} MiB are free under {folder}",
            "make room there, or name another folder with --runs",
        )


def require_writable(runs: Path) -> None:
    """Refuse a folder for runs that cannot be written.

    Raises:
        UserError: with what the system says.
    """
    import tempfile

    try:
        runs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=runs):
            pass
    except OSError as error:
        raise UserError(f"cannot write {runs}: {error.strerror}", "name another folder with --runs") from None
