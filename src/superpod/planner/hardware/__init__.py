"""GPUs, nodes and fabrics, defined in `data/hardware.toml` with sources for their numbers.

>>> from superpod.planner import hardware
>>> hardware.node("h100").gpu.hbm_gb
80.0

Measured efficiencies are in `planner/calibration/`. Users define hardware in a TOML file of the same format, which
`load` adds to the built-in tables.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from superpod.common import collection
from superpod.planner.formats.config_files import read_text
from superpod.planner.hardware import hardware_file
from superpod.planner.hardware.devices import GIB, Fabric, Gpu, Hardware, Node, pick
from superpod.planner.hardware.precisions import PLAIN, PRECISIONS, precision

__all__ = [
    "DATA",
    "GIB",
    "PLAIN",
    "PRECISIONS",
    "Fabric",
    "Gpu",
    "Hardware",
    "Node",
    "builtin",
    "fabric",
    "gpu",
    "load",
    "match_gpu",
    "node",
    "pick",
    "precision",
]

DATA = Path(__file__).parents[1] / "data" / "hardware.toml"


def gpu(name: str) -> Gpu:
    """Return a built-in GPU by name. Raises UserError if there is no such GPU."""
    return builtin().gpu(name)


def node(name: str) -> Node:
    """Return a built-in node by name; `h100` is DGX H100. Raises UserError if there is no such node."""
    return builtin().node(name)


def fabric(name: str) -> Fabric:
    """Return a built-in fabric by name. Raises UserError if there is no such fabric."""
    return builtin().fabric(name)


@cache
def builtin() -> Hardware:
    """Return the hardware in `data/hardware.toml` and in user collections (common/collection.py).

    Raises:
        UserError: a file in a collection is invalid, or redefines a name.
    """
    facts = hardware_file.add(read_text(DATA), DATA.name, Hardware({}, {}, {}))
    for path in collection.files("hardware"):
        facts = hardware_file.add(read_text(path), str(path), facts, new_names=True)
    return facts


def load(path: str | Path) -> Hardware:
    """Return the built-in hardware with the tables `[gpu.NAME]`, `[node.NAME]`, `[fabric.NAME]` of a user's file added.

    `like = "h100"` in a table copies the fields that the table does not set.

    Raises:
        UserError: the file is invalid; the message has its name, line, table and key.
    """
    return hardware_file.add(read_text(Path(path)), str(path), builtin())


def match_gpu(text: str) -> str:
    """Return the planner's name of a GPU that Slurm or nvidia-smi reports: `NVIDIA H100 80GB HBM3` is h100.

    "" if none matches, because sites choose GPU names freely in Slurm.
    """
    facts = builtin()
    name = facts.gpu_name(text)
    if name in facts.gpus:
        return name
    words = set(re.split(r"[^a-z0-9]+", text.lower()))
    # All words must occur: a100_40gb needs both `a100` and `40gb`.
    matches = [name for name in facts.gpus if set(name.split("_")) <= words]
    return max(matches, key=len, default="")
