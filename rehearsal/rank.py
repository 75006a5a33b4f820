"""One rank of a Slurm job whose GPUs are only declared: `srun ... python -m superpod.rehearsal.rank recipe.py`.

As `node/rank.py`, but that the recipe is rehearsed on CPUs; so the ranks' Python needs this project beside NeMo.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from superpod import rehearsal
from superpod.node import rank


def rehearsed(partial: Any) -> Any:
    """The same recipe for CPUs, on as many nodes and ranks as it was written for."""
    nodes, devices = partial.trainer.num_nodes, partial.trainer.devices
    partial, changes = rehearsal.rehearse(partial, devices=nodes * devices)
    partial.trainer.num_nodes, partial.trainer.devices = nodes, devices
    if os.environ["RANK"] == "0":
        print("".join(f"{c.path or 'recipe'}: {c.old} -> {c.new}  ({c.reason})\n" for c in changes), flush=True)
    return partial


if __name__ == "__main__":
    rank.main(Path(sys.argv[1]), before=rehearsal.install, change=rehearsed)
