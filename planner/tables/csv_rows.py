"""`recipes predict`: reads a CSV file of runs (columns of `published.py`) and writes a row of figures for each."""

from __future__ import annotations

import csv
import itertools
import os
import re
import signal
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import IO

from superpod.errors import UserError
from superpod.planner import predict as predicting
from superpod.planner.predict import Prediction, Run
from superpod.planner.tables import published

FIGURES = (
    *("verdict", "reason", "step_time_s", "tokens_per_s_per_gpu", "mfu"),
    *("allocated_gib_first", "allocated_gib_last", "allocated_gib_max", "reserved_gib_max"),
)
BREAKDOWN = ("terms_s", "owners_gib")
"""Seconds by what they are spent on and GiB by owner, as `name=value name=value`."""
BATCH = 10_000
"""Rows costed at once."""
NEEDED = ("model", "gpu", "tp")
"""Without these columns a file is another kind of table."""


def predict(source: Path, out: Path) -> dict[str, int]:
    """Write the prediction of every row of `source` to `out`; the verdicts and how many there are of each.

    Raises:
        UserError: when `source` is no such table, or `out` cannot be written. `out` is whole or not there.
    """
    counts: Counter[str] = Counter()
    if not out.name:
        raise UserError(f"{str(out)!r} is no name of a file", "name the CSV to write: --out predicted.csv")
    if out.exists() and source.exists() and out.samefile(source):
        raise UserError(f"{out} is the table that is read", "give --out another name")
    device = out.exists() and not out.is_file()  # /dev/stdout and its like are written to, not replaced
    partial = out if device else out.with_name(f"{out.name}.partial")
    try:
        with source.open(newline="", encoding="utf-8-sig") as file, partial.open("w", newline="") as sink:
            sink.write(",".join(["id", *FIGURES, *BREAKDOWN]) + "\n")
            for lines, verdicts in _predicted(_batches(file, source)):
                sink.write(lines)
                counts.update(verdicts)
            if not counts:
                raise UserError(f"{source} has no rows")
        if not device:
            os.replace(partial, out)
    except UnicodeDecodeError as broken:
        raise UserError(f"{source} is no UTF-8 text: {broken}") from broken
    except csv.Error as broken:
        raise UserError(f"{source} is no CSV file: {broken}") from broken
    except OSError as broken:
        raise UserError(f"{broken.filename or out} cannot be read or written: {broken.strerror}") from broken
    finally:
        if not device:
            with suppress(OSError):
                partial.unlink()
    return dict(counts)


Batch = tuple[list[str], list[list[str]]]
"""Names of the columns, and rows of their values."""


def _batches(file: IO[str], source: Path) -> Iterator[Batch]:
    reader = csv.reader(file)
    names = next(reader, [])
    if missing := [key for key in NEEDED if key not in names]:
        raise UserError(f"{source} has no column {', '.join(missing)}", "its first line names the columns")
    rows = filter(None, reader)
    return ((names, batch) for batch in iter(lambda: list(itertools.islice(rows, BATCH)), []))


def _predicted(batches: Iterator[Batch]) -> Iterator[tuple[str, Counter[str]]]:
    """The batches' lines and verdicts in order; more than one batch is spread over the cores."""
    first = list(itertools.islice(batches, 2 * (os.cpu_count() or 1)))
    if len(first) < 2 or (os.cpu_count() or 1) < 2:
        yield from map(_one, itertools.chain(first, batches))
        return
    from concurrent.futures import ProcessPoolExecutor

    pool = ProcessPoolExecutor(initializer=_ignore_interrupts)
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        waiting = deque(pool.submit(_one, batch) for batch in first)
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(pool.submit(_one, batch) for batch in itertools.islice(batches, 1))
    finally:
        signal.signal(signal.SIGTERM, before)
        pool.shutdown(cancel_futures=True)


def _leave(*_: object) -> None:
    """SIGTERM ends the workers too, and takes the half-written file away."""
    raise SystemExit(128 + signal.SIGTERM)


def _ignore_interrupts() -> None:
    """Ctrl-C and SIGTERM are the parent's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _one(batch: Batch) -> tuple[str, Counter[str]]:
    names, rows = batch
    table = [dict(zip(names, values, strict=False)) for values in rows]
    predictions = predict_rows(table)
    lines = "".join([_line(row.get("id", ""), p) for row, p in zip(table, predictions, strict=True)])
    return lines, Counter(p.verdict for p in predictions)


def predict_rows(table: Iterable[published.Row]) -> list[Prediction]:
    """The runs of published rows, in their order."""
    refusals: list[Prediction | None] = []
    runs: list[Run] = []
    for row in table:
        try:
            runs.append(published.run(row))
            refusals.append(None)
        except published.Unsupported as why:
            refusals.append(Prediction("unsupported", str(why)))
        except UserError as why:
            refusals.append(Prediction("illegal", str(why)))
        except (ArithmeticError, LookupError, TypeError, ValueError) as why:  # a row may hold any text at all
            refusals.append(Prediction("illegal", f"the row cannot be read: {why}"))
    predictions = iter(predicting.runs(runs))
    return [refusal or next(predictions) for refusal in refusals]


NUMBERS = FIGURES[2:]
_NUMBERS_OF = attrgetter(*NUMBERS)
_SHOWN = ",".join(["%.6g"] * len(NUMBERS))
_NO_FIGURES = "," * (len(NUMBERS) + len(BREAKDOWN) - 1)


def _line(name: str, p: Prediction) -> str:
    """A line of the output; csv.writer takes as long as the prediction itself."""
    head = f"{_quoted(name)},{p.verdict},{_quoted(p.reason)}"
    if p.step_time_s is None:
        return f"{head},{_NO_FIGURES}\n"
    numbers = _SHOWN % _NUMBERS_OF(p)
    terms, owners = (_named(tuple(part)) % tuple(part.values()) for part in (p.terms_s, p.owners_gib))
    return f"{head},{numbers},{terms},{owners}\n"


def _quoted(text: str) -> str:
    """A field as RFC 4180 has it."""
    return '"' + text.replace('"', '""') + '"' if _SPECIAL(text) else text


_SPECIAL = re.compile('[,"\r\n]').search


@cache
def _named(names: tuple[str, ...]) -> str:
    return " ".join(f"{name}=%.4g" for name in names)
