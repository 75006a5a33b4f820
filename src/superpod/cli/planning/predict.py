"""`recipes predict`: predict memory and step time for every row of a CSV file."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.planner.tables.csv_rows import RowOptions


def predict(
    rows: Annotated[Path, typer.Option("--from", help="CSV file with the columns listed in docs/planner.md.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="CSV file to write, with one row per input row in the same order.")
    ] = None,
    hardware: Annotated[
        Path | None, typer.Option("--hardware", help="TOML file with your own GPUs, nodes and fabrics.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON object per row, with the layout, to --out or to stdout.")
    ] = False,
) -> None:
    """Predict memory and step time for every row of a table, with a verdict: ok, oom, illegal or unsupported."""
    from superpod.collection.facts import names
    from superpod.planner.tables import csv_rows

    if out is None and not as_json:
        raise UserError("no output is specified", "add --out predicted.csv, or --json to print")
    options = csv_rows.RowOptions(hardware, as_json, names.translate)
    if out is None:
        _print(rows, options)
        return
    is_input = rows.exists() and out.exists() and out.samefile(rows)
    if not is_input:  # `csv_rows.predict` refuses to overwrite its input, with its own message
        _check_output(out)
    counts = csv_rows.predict(rows, out, options, _note)
    print(f"{out}: " + ", ".join(f"{count:,} {verdict}" for verdict, count in counts.items()))


def _check_output(out: Path) -> None:
    from superpod.common import output_file

    output_file.check(out, "--out", _is_prediction, by="recipes predict", to_devices=True)


def _is_prediction(start: bytes, _: bytes) -> bool:
    """Return whether the start of a file is output of `recipes predict`, in CSV or JSON."""
    from superpod.planner.tables.csv_rows import BREAKDOWN, FIGURES

    if start.startswith(b'{"id": '):  # `start` may end within the row
        return all(f'"{name}": '.encode() in start for name in FIGURES[:3])
    return start.startswith(",".join(["id", *FIGURES, *BREAKDOWN]).encode())


def _print(rows: Path, options: RowOptions) -> None:
    """Print the predictions to stdout.

    `csv_rows.predict` replaces its output file. If stdout is a regular file, which must not be replaced, it writes to
    a temporary file that is then copied.
    """
    from superpod.planner.tables import csv_rows

    if not stat.S_ISREG(os.fstat(1).st_mode):
        csv_rows.predict(rows, Path("/dev/stdout"), options, _note)
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "rows"
        csv_rows.predict(rows, copy, options, _note)
        with copy.open("rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)
