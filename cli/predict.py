"""`recipes predict`: memory and step time of every row of a table."""

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
    from superpod.planner.tables.csv_rows import Form


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
    form = csv_rows.Form(hardware, as_json)
    if out is None:
        _print(rows, form)
        return
    if not rows.exists() or not out.exists() or not out.samefile(rows):  # else that is said
        _check(out)
    counts = csv_rows.predict(rows, out, form, _note)
    print(f"{out}: " + ", ".join(f"{count:,} {verdict}" for verdict, count in counts.items()))


def _check(out: Path) -> None:
    from superpod.lifecycle import own_file

    own_file.check(out, "--out", _is_ours, by="recipes predict", to_devices=True)


def _is_ours(start: bytes, _: bytes) -> bool:
    """Whether a file begins as `recipes predict` writes it: with the columns of its CSV, or with a row of its JSON."""
    from superpod.planner.tables.csv_rows import BREAKDOWN, FIGURES

    if start.startswith(b'{"id": '):  # the rest of a row may be cut off
        return all(f'"{name}": '.encode() in start for name in FIGURES[:3])
    return start.startswith(",".join(["id", *FIGURES, *BREAKDOWN]).encode())


def _print(rows: Path, form: Form) -> None:
    """Print the rows. Where standard output is a file, its path is not to be replaced: a copy is made."""
    from superpod.planner.tables import csv_rows

    if not stat.S_ISREG(os.fstat(1).st_mode):
        csv_rows.predict(rows, Path("/dev/stdout"), form, _note)
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "rows"
        csv_rows.predict(rows, copy, form, _note)
        with copy.open("rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)


def _note(words: str) -> None:
    print(f"note: {words}", file=sys.stderr)
