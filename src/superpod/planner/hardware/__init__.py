"""The GPUs, nodes and fabrics that are planned for. The numbers and their sources: `data/hardware.toml`.

>>> from superpod.planner import hardware
>>> hardware.node("h100").gpu.hbm_gb
80.0

What the hardware does in practice (efficiency, measured collectives) is calibration: `planner/calibration/`. A user
adds hardware in a TOML file of the same form; `load` reads it over the built-in tables.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from superpod.common import collection
from superpod.planner.formats.files import read_text
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
    "node",
    "pick",
    "precision",
]

DATA = Path(__file__).parents[1] / "data" / "hardware.toml"


def gpu(name: str) -> Gpu:
    """A built-in GPU. Raises UserError naming the closest ones when there is none."""
    return builtin().gpu(name)


def node(name: str) -> Node:
    """A built-in node; `h100` is DGX H100. Raises as `gpu`."""
    return builtin().node(name)


def fabric(name: str) -> Fabric:
    """A built-in fabric. Raises as `gpu`."""
    return builtin().fabric(name)


@cache
def builtin() -> Hardware:
    """The hardware of `data/hardware.toml`, and after it that of the user's collections (common/collection.py).

    Raises:
        UserError: when a collection's file is wrong, or gives a name that is taken.
    """
    facts = hardware_file.add(read_text(DATA), DATA.name, Hardware({}, {}, {}))
    for path in collection.files("hardware"):
        facts = hardware_file.add(read_text(path), str(path), facts, new_names=True)
    return facts


def load(path: str | Path) -> Hardware:
    """The user's hardware over the built-in: tables `[gpu.NAME]`, `[node.NAME]`, `[fabric.NAME]`, `[generation.NAME]`.

    `like = "h100"` in a table takes what the table does not say from a built-in one.

    Raises:
        UserError: naming file, line, table and key, and what the key may hold.
    """
    return hardware_file.add(read_text(Path(path)), str(path), builtin())
