"""`predict` over a CSV file: columns of contracts.md in, a row of figures out for every row in."""

from __future__ import annotations

import csv
import io
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from superpod.planner import predict as predicting
from superpod.planner.errors import UserError
from superpod.planner.predict import Prediction

FIGURES = (
    *("verdict", "reason", "step_time_s", "tokens_per_s_per_gpu", "mfu"),
    *("allocated_gib_first", "allocated_gib_last", "allocated_gib_max", "reserved_gib_max"),
)
BREAKDOWN = ("terms_s", "owners_gib")
"""Seconds by what they are spent on and GiB by owner, as `name=value name=value`."""
BATCH = 50_000
"""Rows costed at once."""
NEEDED = ("model", "gpu", "tp")
"""Without these columns a file is another kind of table."""


def predict(source: Path, out: Path) -> dict[str, int]:
    """Write the prediction of every row of `source` to `out`; the verdicts and how many there are of each.

    Raises:
        UserError: when `source` is no such table, or `out` cannot be written. `out` is whole or not there.
    """
    counts: Counter[str] = Counter()
    partial = out.with_name(f"{out.name}.partial")
    try:
        with source.open(newline="", encoding="utf-8-sig") as file, partial.open("w", newline="") as sink:
            for lines in _written(csv.DictReader(file), source, counts):
                sink.write(lines)
        os.replace(partial, out)
    except UnicodeDecodeError as broken:
        raise UserError(f"{source} is no UTF-8 text: {broken}") from broken
    except csv.Error as broken:
        raise UserError(f"{source} is no CSV file: {broken}") from broken
    except OSError as broken:
        raise UserError(f"{broken.filename or out} cannot be read or written: {broken.strerror}") from broken
    finally:
        with suppress(OSError):
            partial.unlink()
    return dict(counts)


def _written(reader: csv.DictReader[str], source: Path, counts: Counter[str]) -> Iterator[str]:
    columns = reader.fieldnames or []
    if missing := [key for key in NEEDED if key not in columns]:
        raise UserError(f"{source} has no column {', '.join(missing)}", "its first line names the columns")
    yield _lines([["id", *FIGURES, *BREAKDOWN]])
    for batch in iter(lambda: list(itertools.islice(reader, BATCH)), []):
        found = predicting.rows(batch)
        counts.update(p.verdict for p in found)
        yield _lines([row.get("id", ""), *_figures(each)] for row, each in zip(batch, found, strict=True))
    if not counts:
        raise UserError(f"{source} has no rows")


def _lines(rows: Iterable[list[Any]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


def _figures(p: Prediction) -> list[Any]:
    values = [getattr(p, key) for key in FIGURES]
    shown = [f"{value:.6g}" if isinstance(value, float) else "" if value is None else value for value in values]
    return shown + [" ".join(f"{key}={value:.4g}" for key, value in getattr(p, each).items()) for each in BREAKDOWN]
