"""Which GPU of the planner's a name of Slurm's, or of nvidia-smi, stands for."""

from __future__ import annotations

import re

from superpod.planner import hardware


def gpu_named(text: str) -> str:
    """The planner's name of a GPU that others call `text`: `nvidia_h100_80gb_hbm3` or `NVIDIA H100 80GB HBM3` is h100.

    "" where the planner knows none of that name: a site may call its GPUs as it likes.
    """
    facts = hardware.builtin()
    if (name := facts.gpu_name(text)) in facts.gpus:
        return name
    words = set(re.split(r"[^a-z0-9]+", text.lower()))
    # a100_40gb is meant only where both of its words are there.
    matches = [name for name in facts.gpus if set(name.split("_")) <= words]
    return max(matches, key=len, default="")
