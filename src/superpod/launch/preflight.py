"""Check memory, disk space and permissions before a local run starts. Needs no NeMo, whose import takes 20 s."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.requests.request import Request

LOGS_BYTES = 16 * 2**20
"""Estimate of what a run writes besides its checkpoints."""
PROCESS_GIB = 0.8
"""Memory of a process with NeMo but without a model."""
TRAINING_BYTES, FROZEN_BYTES = 18, 2
"""Per parameter: in training, weight 2, gradient 4, main weight 4, two moments 8; under an adapter, its weight."""

_SIZES = ("model.", "peft", "trainer.devices", "trainer.num_nodes", "trainer.strategy", "with")
"""Overrides that may change the memory of a run."""


def may_have_gpu() -> bool:
    """Whether the device files of NVIDIA's driver, or WSL's, exist. Does not import torch."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def require_planned_memory(request: Request) -> None:
    """Refuse a rehearsal at full size whose parameters alone, in one copy, exceed this machine's memory.

    Requests with overrides of the model or the layout may be smaller; `local.prepare` checks them after the build.

    Raises:
        UserError: with the least memory that the rehearsal needs, and the free memory.
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
            f"this machine has no GPU, and rehearsing {request.recipe} on CPUs at full size takes {ranks} processes "
            f"and at least {need:,.0f} GiB, but only {have:.0f} GiB are free",
            f"`recipes rehearse {request.recipe}{size}` shrinks it to this machine; or run it on a machine with its "
            "GPUs",
        )


def require_disk_space(folder: Path, checkpoint_bytes: int) -> None:
    """Refuse a run if its disk lacks space for two checkpoints: the latest complete one, and the one being written.

    Raises:
        UserError: with the required and the free space.
    """
    need = 2 * checkpoint_bytes + LOGS_BYTES
    free = shutil.disk_usage(folder).free
    if free < need:
        raise UserError(
            f"two checkpoints of {checkpoint_bytes / 2**20:,.0f} MiB and logs need {need / 2**20:,.0f} MiB, but only "
            f"{free / 2**20:,.0f} MiB are free in {folder}",
            "free some space there, or specify another folder with --runs",
        )


def require_writable(runs: Path) -> None:
    """Refuse a folder for runs that is not writable; create it if it does not exist.

    Raises:
        UserError: with the system's error.
    """
    import tempfile

    try:
        runs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=runs):
            pass
    except OSError as error:
        raise UserError(f"cannot write to {runs}: {error.strerror}", "specify another folder with --runs") from None
