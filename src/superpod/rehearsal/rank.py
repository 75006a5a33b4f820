"""Runs a rank of a Slurm job on nodes without their declared GPUs: `srun ... python -m superpod.rehearsal.rank FILE`.

The same as `runtime/rank/rank.py`, but rehearses the recipe on CPUs. Requires both this project and NeMo.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from superpod import rehearsal
from superpod.runtime.rank import rank

if TYPE_CHECKING:
    from nemo_run import Partial


def convert(partial: Partial) -> Partial:
    """Convert a recipe to a rehearsal on CPUs with the recipe's own numbers of nodes and of ranks per node."""
    nodes, devices = partial.trainer.num_nodes, partial.trainer.devices
    partial, changes = rehearsal.rehearse(partial, devices=nodes * devices)
    # `rehearse` puts all ranks on one node; Slurm has started them on the recipe's nodes.
    partial.trainer.num_nodes, partial.trainer.devices = nodes, devices
    if os.environ["RANK"] == "0":
        print("".join(f"{c.path or 'recipe'}: {c.old} -> {c.new}  ({c.reason})\n" for c in changes), flush=True)
    return partial


if __name__ == "__main__":
    rank.main(Path(sys.argv[1]), before=rehearsal.install, change=convert)
