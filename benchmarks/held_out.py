"""Select the hold-out of the tables in benchmarks/reference: a fifth of the configurations, excluded from fits."""

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
"""Table -> columns that identify a configuration; its rows of all releases are either held out or not."""
FACTS = published.Facts(hardware.load(Path(__file__).parent / "reference" / "hardware.toml"))
TWIN = "twin"
"""Value of `held_out` for a row whose configuration is fitted from another table that spells it differently; it is
neither fitted nor scored."""
DEGREES = ("tp", "pp", "vp", "cp", "ep", "etp")


def is_held_out(row: Row) -> bool:
    """Return whether a row of a condensed table is held out."""
    return row["held_out"] == "yes"


def is_selected(row: Row, kind: str) -> bool:
    """Return whether the configuration of a raw row is held out, by its hash."""
    text = "|".join(row.get(key) or "" for key in BY[kind])
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % 5 == 0


def configuration(row: Row) -> tuple[object, ...]:
    """Return a key for the configuration of a condensed row of step times, independent of spelling (`mxfp8`, `fp8-mx`).

    It does not contain the recomputation, which some tables do not print.
    """
    try:
        job = published.job(row, FACTS)
    except UserError:
        return tuple(row.get(key) or ("1" if key in DEGREES else "") for key in BY["time"])
    x = job.layout
    degrees = (x.tp, x.pp, x.vp or 1, x.cp, x.ep, x.etp or x.tp, x.sharding, x.mbs, x.gbs)
    return (job.task, job.model, job.node.gpu.name, job.gpus, job.precision, job.seq, *degrees)


def mark_twins(rows: list[dict[str, str]]) -> None:
    """Mark held-out rows whose configuration is also fitted from another table, because they would not test the fit."""
    fitted = {configuration(row) for row in rows if not row["held_out"]}
    for row in rows:
        if row["held_out"] and configuration(row) in fitted:
            row["held_out"] = TWIN
