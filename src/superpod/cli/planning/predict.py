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

from superpod.cli.options.hardware_option import HardwareFile
from superpod.cli.options.size_options import print_note
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.planner.tables.csv_rows import RowOptions


def predict(
    rows: Annotated[Path, typer.Option("--from", help="CSV file with the columns listed in docs/planner.md.")],
    out: Annotated[Path | None, typer.Option("--out", help="CSV file to write, in the order of the input.")] = None,
    hardware: HardwareFile = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON object per row, with the layout, to --out or to stdout.")
    ] = False,
) -> None:
    """Predict memory, step time and verdict (ok, oom, illegal or unsupported) for every row of a CSV file."""
    from superpod.collection.facts import names
    from superpod.common import output_file
    from superpod.planner.tables import csv_rows

    if out is None and not as_json:
        raise UserError("predict needs --out or --json", "add --out predicted.csv, or --json to print")
    options = csv_rows.RowOptions(hardware, as_json, names.translate)
    if out is None:
        _print(rows, options)
        return
    is_input = rows.exists() and out.exists() and out.samefile(rows)
    if not is_input:  # `csv_rows.predict` refuses to overwrite its input, with its own message
        output_file.check(out, "--out", _is_prediction, by="recipes predict", to_devices=True)
    counts = csv_rows.predict(rows, out, options, print_note)
    print(f"{out}: " + ", ".join(f"{count:,} {verdict}" for verdict, count in counts.items()))


def _is_prediction(start: bytes, _: bytes) -> bool:
    """Return whether a file that begins with `start` is output of `recipes predict`, in CSV or JSON."""
    from superpod.planner.tables.csv_rows import BREAKDOWN, FIGURES

    if start.startswith(b'{"id": '):  # `start` may end within the row
        return all(f'"{name}": '.encode() in start for name in FIGURES[:3])
    return start.startswith(",".join(["id", *FIGURES, *BREAKDOWN]).encode())


def _print(rows: Path, options: RowOptions) -> None:
    """Print the predictions for the rows of a CSV file to stdout.

    `csv_rows.predict` replaces its output file. If stdout is a regular file, which must not be replaced, the output is
    written to a temporary file and copied.
    """
    from superpod.planner.tables import csv_rows

    if not stat.S_ISREG(os.fstat(1).st_mode):
        csv_rows.predict(rows, Path("/dev/stdout"), options, print_note)
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "rows"
        csv_rows.predict(rows, copy, options, print_note)
        with copy.open("rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
