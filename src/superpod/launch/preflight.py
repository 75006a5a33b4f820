"""Check memory, disk space and permissions before a local run starts. Does not import NeMo, which takes 20 s."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.requests.request import Request

LOGS_BYTES = 16 * 2**20
"""Estimated bytes of the files that a run writes in addition to checkpoints."""
PROCESS_GIB = 0.8
"""Host memory of a process that has imported NeMo, without a model."""
TRAINING_BYTES, FROZEN_BYTES = 18, 2
"""Bytes per parameter: trained (weight 2, gradient 4, main weight 4, two moments 8), and frozen under an adapter."""

_SIZES = ("model.", "peft", "trainer.devices", "trainer.num_nodes", "trainer.strategy", "with")
"""Prefixes of overrides that may change the memory of a run."""


def may_have_gpu() -> bool:
    """Return whether device files of the NVIDIA driver or of WSL exist. Does not import torch."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def require_planned_memory(request: Request) -> None:
    """Refuse a full-size rehearsal on CPUs whose parameters alone exceed the free memory of this machine.

    Requests that override the model or the layout may be smaller; `local.prepare` checks them after the build. Raises
    UserError.
    """
    if any(text.startswith(_SIZES) for text in request.overrides) or may_have_gpu():
        return
    job = request.job()
    parameter_bytes = FROZEN_BYTES if job.task == "lora" else TRAINING_BYTES
    needed_gib = job.gpus * PROCESS_GIB + job.model.total_parameters() * parameter_bytes / 2**30
    size_option = f" --nodes {request.num_nodes}" if request.num_nodes else ""
    require_rehearsal_memory(request.recipe, job.gpus, needed_gib, size_option)


def require_rehearsal_memory(name: str, ranks: int, needed_gib: float, size_option: str = "") -> None:
    """Raise UserError if a full-size rehearsal of the recipe `name` on CPUs needs more memory than is free.

    `size_option` is added to the suggested command, such as " --nodes 2".
    """
    import psutil

    free_gib = psutil.virtual_memory().available / 2**30
    if needed_gib > free_gib:
        raise UserError(
            f"this machine has no GPU, and a full-size rehearsal of {name} on CPUs needs {ranks} processes and at "
            f"least {needed_gib:,.0f} GiB, but only {free_gib:.0f} GiB are free",
            f"run `recipes rehearse {name}{size_option}`, which shrinks it to fit this machine, or use a machine with "
            "these GPUs",
        )


def require_disk_space(folder: Path, checkpoint_bytes: int) -> None:
    """Raise UserError if the disk of `folder` lacks space for two checkpoints: the latest, and the one being saved."""
    needed_bytes = 2 * checkpoint_bytes + LOGS_BYTES
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise UserError(
            f"two checkpoints of {checkpoint_bytes / 2**20:,.0f} MiB and logs need {needed_bytes / 2**20:,.0f} MiB, "
            f"but only {free_bytes / 2**20:,.0f} MiB are free in {folder}",
            "free up space, or specify a different folder with --runs",
        )


def require_writable(runs: Path) -> None:
    """Create the folder for runs if it does not exist. Raises UserError if it is not writable."""
    import tempfile

    try:
        runs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=runs):
            pass
    except OSError as error:
        raise UserError(f"cannot write to {runs}: {error.strerror}", "specify a different folder with --runs") from None
