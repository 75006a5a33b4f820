"""Which rows of the tables in benchmarks/reference are the hold-out: a fifth of the configurations, never fitted on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from superpod.errors import UserError
from superpod.planner import hardware
from superpod.planner.tables import published

Row = Mapping[str, str]

BY = {
    "memory": (
        *("case", "model", "layers", "hidden", "gpu", "gpus", "seq", "gbs", "mbs"),
        *("tp", "pp", "vp", "cp", "ep", "etp"),
    ),
    "time": (
        *("task", "model", "layers", "hidden", "gpu", "gpus", "precision", "seq", "gbs", "mbs"),
        *("tp", "pp", "vp", "cp", "ep", "etp", "fsdp", "recompute"),
    ),
}
"""What makes a configuration: its rows of all releases are on one side of the hold-out."""
FACTS = published.Facts(hardware.load(Path(__file__).parent / "reference" / "hardware.toml"))
TWIN = "twin"
"""In `held_out`: a row whose configuration the fit has from another table, in other words. It is neither fitted nor
scored."""
DEGREES = ("tp", "pp", "vp", "cp", "ep", "etp")


def is_held_out(row: Row) -> bool:
    """Whether a row of a condensed table is in the hold-out."""
    return row["held_out"] == "yes"


def drawn(row: Row, kind: str) -> bool:
    """Whether a raw row is of the fifth of the configurations that nothing is fitted on."""
    text = "|".join(row.get(key) or "" for key in BY[kind])
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % 5 == 0


def configuration(row: Row) -> tuple[object, ...]:
    """What makes the configuration of a condensed row of step times: the run that its words stand for, since tables
    write one in several ways (`mxfp8`, `fp8-mx`). What it recomputes is left out: some tables do not print it.
    """
    try:
        job = published.job(row, FACTS)
    except UserError:
        return tuple(row.get(key) or ("1" if key in DEGREES else "") for key in BY["time"])
    x = job.layout
    degrees = (x.tp, x.pp, x.vp or 1, x.cp, x.ep, x.etp or x.tp, x.sharding, x.mbs, x.gbs)
    return (job.task, job.model, job.node.gpu.name, job.gpus, job.precision, job.seq, *degrees)


def name_twins(rows: list[dict[str, str]]) -> None:
    """Take from the hold-out what another table prints otherwise and the fit has: it would be no test."""
    fitted = {configuration(row) for row in rows if not row["held_out"]}
    for row in rows:
        if row["held_out"] and configuration(row) in fitted:
            row["held_out"] = TWIN
