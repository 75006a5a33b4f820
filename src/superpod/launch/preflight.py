"""Check memory, disk space and permissions before a local run starts, without importing NeMo, which takes 20 s."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.requests.request import Request

LOGS_BYTES = 16 * 2**20
"""Estimated size of what a run writes in addition to checkpoints, in bytes."""
PROCESS_GIB = 0.8
"""Memory of a process that has imported NeMo, without a model."""
TRAINING_BYTES, FROZEN_BYTES = 18, 2
"""Bytes per parameter: trained (weight 2, gradient 4, main weight 4, two moments 8), and frozen under an adapter."""

_SIZES = ("model.", "peft", "trainer.devices", "trainer.num_nodes", "trainer.strategy", "with")
"""Overrides that may change the memory of a run."""


def may_have_gpu() -> bool:
    """Return whether device files of the NVIDIA driver, or of WSL, exist. Does not import torch."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def require_planned_memory(request: Request) -> None:
    """Refuse a rehearsal at full size if a single copy of its parameters exceeds the memory of this machine.

    Requests that override the model or the layout may be smaller; `local.prepare` checks them after the build.

    Raises:
        UserError: the rehearsal is refused; the message gives the memory that it needs and the free memory.
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
            f"this machine has no GPU, and a full-size rehearsal of {request.recipe} on CPUs needs {ranks} "
            f"processes and at least {need:,.0f} GiB, but only {have:.0f} GiB are free",
            f"`recipes rehearse {request.recipe}{size}` shrinks it to fit this machine; or run it on a machine with "
            "these GPUs",
        )


def require_disk_space(folder: Path, checkpoint_bytes: int) -> None:
    """Refuse a run if the disk lacks space for two checkpoints: the latest complete one, and the one being written.

    Raises:
        UserError: there is too little space; the message gives the required and the free space.
    """
    need = 2 * checkpoint_bytes + LOGS_BYTES
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < need:
        raise UserError(
            f"two checkpoints of {checkpoint_bytes / 2**20:,.0f} MiB and logs need {need / 2**20:,.0f} MiB, but only "
            f"{free_bytes / 2**20:,.0f} MiB are free in {folder}",
            "free some space there, or specify a different folder with --runs",
        )


def require_writable(runs: Path) -> None:
    """Refuse a folder for runs that is not writable; create it if it does not exist.

    Raises:
        UserError: the folder is not writable; the message gives the system error.
    """
    import tempfile

    try:
        runs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=runs):
            pass
    except OSError as error:
        raise UserError(f"cannot write to {runs}: {error.strerror}", "specify a different folder with --runs") from None
