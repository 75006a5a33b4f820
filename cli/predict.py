"""`recipes predict`: memory and step time of every row of a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def predict(
    rows: Annotated[Path, typer.Option("--from", help="CSV with the columns of docs/planner.md.")],
    out: Annotated[Path, typer.Option("--out", help="CSV to write: a row for every row, in the same order.")],
) -> None:
    """Predict memory and step time of every row of a table, with a verdict: ok, oom, illegal or unsupported."""
    from superpod.planner.tables import csv_rows

    counts = csv_rows.predict(rows, out)
    print(f"{out}: " + ", ".join(f"{count:,} {verdict}" for verdict, count in counts.items()))
