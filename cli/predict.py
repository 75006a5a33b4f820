"""`recipes predict`: memory and step time of every row of a table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from superpod.errors import UserError


def predict(
    rows: Annotated[Path, typer.Option("--from", help="CSV with the columns of docs/planner.md.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="CSV to write: a row for every row, in the same order.")
    ] = None,
    hardware: Annotated[
        Path | None, typer.Option("--hardware", help="TOML with your own GPUs, nodes and fabrics.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON object a row, with its layout; to --out, or else printed.")
    ] = False,
) -> None:
    """Predict memory and step time of every row of a table, with a verdict: ok, oom, illegal or unsupported."""
    from superpod.planner.tables import csv_rows

    if out is None and not as_json:
        raise UserError("there is nowhere to write to", "name the CSV to write: --out predicted.csv; or --json")
    counts = csv_rows.predict(rows, out or Path("/dev/stdout"), csv_rows.Form(hardware, as_json), _note)
    if out is not None:
        print(f"{out}: " + ", ".join(f"{count:,} {verdict}" for verdict, count in counts.items()))


def _note(words: str) -> None:
    print(f"note: {words}", file=sys.stderr)
