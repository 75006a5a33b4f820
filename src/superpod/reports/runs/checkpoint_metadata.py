"""The metadata of a checkpoint, as `checkpoint_metadata.py` reads it, and the layout it was saved under."""

from __future__ import annotations

from pathlib import Path

from superpod.planner.layout import PARALLEL_SIZES
from superpod.runtime.checkpoints import checkpoint_files
from superpod.runtime.checkpoints.checkpoint_metadata import WEIGHTS, CheckpointMetadata, Tensor, read

__all__ = ("WEIGHTS", "CheckpointMetadata", "Tensor", "layout", "read")


def layout(checkpoint: Path) -> dict[str, int]:
    """The layout it was saved under (tp, pp, ..., ranks) according to `context/io.json`; empty when that has none."""
    saved = checkpoint_files.saved_under(checkpoint)
    sizes = {ours: saved[megatrons] for ours, megatrons in PARALLEL_SIZES.items() if megatrons in saved}
    return sizes | ({"ranks": saved["ranks"]} if "ranks" in saved else {})
