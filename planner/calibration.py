"""What hardware and software reach of the nominal: the constants of the time model, from `data/calibration/*.toml`.

A GPU's file holds its constants; tables `[class.*]` multiply some of them for a precision, a software era, a class of
models. A GPU without a file takes `generic.toml`. Nothing here is per row or per model.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from superpod.planner import hardware
from superpod.planner.job import Job

FOLDER = Path(__file__).parent / "data" / "calibration"


def constants(job: Job) -> dict[str, float]:
    """The constants for a job, by name."""
    found = dict(_base(job.node.gpu.name))
    return found


@cache
def _base(gpu: str) -> dict[str, float]:
    path = FOLDER / f"{gpu}.toml"
    tables = hardware.read_toml(path if path.exists() else FOLDER / "generic.toml")
    return {key: float(value) for key, value in tables["constants"].items()}
