"""`recipes predict`: reads a CSV file of runs (columns of `published.py`) and writes a row of figures for each.

Every row has its line, whatever is in it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, NamedTuple

from superpod.errors import UserError
from superpod.parent import end_with_parent
from superpod.planner import hardware as planner_hardware
from superpod.planner import pipeline_layout
from superpod.planner import predict as predicting
from superpod.planner.files import unreadable
from superpod.planner.predict import Prediction, Run
from superpod.planner.tables import csv_cells, header, published
from superpod.planner.tables.csv_cells import Cells

FIGURES = (
    *("verdict", "reason", "step_time_s", "tokens_per_s_per_gpu", "mfu"),
    *("allocated_gib_first", "allocated_gib_last", "allocated_gib_max", "reserved_gib_max"),
)
BREAKDOWN = ("terms_s", "owners_gib")
"""Seconds by what they are spent on and GiB by owner, as `name=value name=value`."""
FIT = "fit"
"""The last column: fits, tight or does not fit, as `plan` and `check` say it; `verdict` calls a tight run ok."""
TABLE = "a CSV file with the columns of docs/planner.md"
BATCH = 10_000
"""Rows costed at once."""


@dataclass(frozen=True)
class Form:
    """What rows are read with, and what is written of each."""

    hardware: Path | None = None
    """A file of the user's own GPUs, nodes and fabrics."""
    as_json: bool = False
    """A JSON object a row in place of a line of CSV, with its layout too."""


PLAIN = Form()


def predict(
    source: Path, out: Path, form: Form = PLAIN, note: Callable[[str], None] = lambda words: None
) -> dict[str, int]:
    """Write the prediction of every row of `source` to `out`; the verdicts and how many there are of each.

    `note` hears of columns that are not read and look like one that is.

    Raises:
        UserError: when `source` is no such table, or `out` cannot be written. `out` is whole or not there.
    """
    counts: Counter[str] = Counter()
    _refuse_out(source, out)
    _facts(form.hardware)  # a mistake in it is named before anything is written
    device = out.exists() and not out.is_file()  # /dev/stdout and its like are written to, not replaced
    partial = out if device else out.with_name(f"{out.name}.partial")
    try:
        # Bytes that are no UTF-8 come back as they were: one row's notes must not cost the table.
        with (
            source.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file,
            partial.open("w", newline="", encoding="utf-8", errors="surrogateescape") as sink,
        ):
            sink.write("" if form.as_json else ",".join(["id", *FIGURES, *BREAKDOWN, FIT]) + "\n")
            for lines, verdicts in _predicted(_batches(file, source, form, note)):
                sink.write(lines)
                counts.update(verdicts)
            if not counts:
                raise UserError(f"{source} has no rows", f"write one a run below the first line: {header.EXAMPLE[1]}")
        if not device:
            os.replace(partial, out)
    except OSError as broken:
        if broken.filename == str(source):
            raise unreadable(source, broken, TABLE) from broken
        raise UserError(f"{broken.filename or out} cannot be written: {broken.strerror}") from broken
    finally:
        if not device:
            with suppress(OSError):
                partial.unlink()
    return dict(counts)


@cache
def _facts(hardware: Path | None) -> published.Facts:
    """The hardware that rows name: the built-in, and that of a file."""
    return published.Facts(planner_hardware.load(hardware)) if hardware else published.builtin()


def _refuse_out(source: Path, out: Path) -> None:
    """Refuse what cannot be written, before anything is. Raises UserError."""
    if not out.name:
        raise UserError(f"{str(out)!r} is no name of a file", "name the CSV to write: --out predicted.csv")
    if out.exists() and source.exists() and out.samefile(source):
        raise UserError(f"{out} is the table that is read", "give --out another name")
    if source.exists() and not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}", "make it first, or name another")


Batch = tuple[list[str], list[Cells], Form]
"""Names of the columns, and rows of their values."""


def _batches(file: IO[str], source: Path, form: Form, note: Callable[[str], None]) -> Iterator[Batch]:
    rows = csv_cells.read(file)
    names = header.names(source, next(rows, Cells([])).values, note)
    return ((names, batch, form) for batch in iter(lambda: list(itertools.islice(rows, BATCH)), []))


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
    end_with_parent()


def _one(batch: Batch) -> tuple[str, Counter[str]]:
    names, rows, form = batch
    table = [csv_cells.named(names, row) for row in rows]
    outcomes = outcomes_of(table, _facts(form.hardware))
    line = _json_line if form.as_json else _line
    lines = "".join([line(row.get("id", ""), o) for row, o in zip(table, outcomes, strict=True)])
    return lines, Counter(o.prediction.outcome for o in outcomes)


class Outcome(NamedTuple):
    """What became of a row."""

    prediction: Prediction
    run: Run | None = None
    """None where the row describes none."""


def predict_rows(table: Iterable[published.Row], facts: published.Facts | None = None) -> list[Prediction]:
    """The runs of a table's rows, in their order: a prediction for every row, whatever is in it."""
    return [outcome.prediction for outcome in outcomes_of(table, facts or published.builtin())]


def outcomes_of(table: Iterable[published.Row], facts: published.Facts) -> list[Outcome]:
    """As `predict_rows`, with the run that each row describes."""
    read = [_run(row, facts) for row in table]
    runs = [run for run in read if isinstance(run, Run)]
    predictions = iter(_predictions(runs))
    return [Outcome(next(predictions), run) if isinstance(run, Run) else Outcome(run) for run in read]


def _run(row: published.Row, facts: published.Facts) -> Run | Prediction:
    """The run of a row, or why it describes none."""
    try:
        if csv_cells.BROKEN in row:
            raise UserError(row[csv_cells.BROKEN])
        return published.run(row, facts)
    except published.Unsupported as why:
        return Prediction("unsupported", published.in_a_line(why))
    except UserError as why:
        return Prediction("illegal", published.in_a_line(why))
    except (ArithmeticError, LookupError, TypeError, ValueError, OSError, RecursionError, MemoryError) as why:
        return Prediction("illegal", f"the row cannot be read: {why}")  # a row may hold any text at all


def _predictions(runs: list[Run]) -> list[Prediction]:
    """The runs' predictions; where they fail together, each half by itself, so that one costs no other its figures."""
    try:
        return predicting.runs(runs)
    except Exception as why:  # whatever a row can hold: a table has a verdict for every row
        if len(runs) == 1:
            words = str(why) if isinstance(why, UserError) else f"it cannot be costed: {type(why).__name__}: {why}"
            return [Prediction("illegal", words)]
        middle = len(runs) // 2
        return [*_predictions(runs[:middle]), *_predictions(runs[middle:])]


NUMBERS = FIGURES[2:]
_NUMBERS_OF = attrgetter(*NUMBERS)
_SHOWN = ",".join(["%.6g"] * len(NUMBERS))
_NO_FIGURES = "," * (len(NUMBERS) + len(BREAKDOWN) - 1)


def _line(name: str, outcome: Outcome) -> str:
    """A line of the output; csv.writer takes as long as the prediction itself."""
    p = outcome.prediction
    head = f"{_quoted(name)},{p.verdict},{_quoted(p.reason)}"
    if p.step_time_s is None:
        return f"{head},{_NO_FIGURES},{p.fit or ''}\n"
    numbers = _SHOWN % _NUMBERS_OF(p)
    terms, owners = (_named(tuple(part)) % tuple(part.values()) for part in (p.terms_s, p.owners_gib))
    return f"{head},{numbers},{terms},{owners},{p.fit or ''}\n"


def _json_line(name: str, outcome: Outcome) -> str:
    """A line of JSON: the columns of the CSV, and of a legal run its layout as Megatron's own string says it too."""
    p, run = outcome.prediction, outcome.run
    figures = {key: getattr(p, key) for key in (*FIGURES, *BREAKDOWN, FIT)}
    layout: dict[str, Any] = {}
    if run is not None and p.step_time_s is not None:
        layout = {"layout": asdict(run.job.layout), "pipeline_layout": pipeline_layout.of(run.job)}
    return json.dumps({"id": name, **figures, **layout}) + "\n"


def _quoted(text: str) -> str:
    """A field as RFC 4180 has it."""
    return '"' + text.replace('"', '""') + '"' if _SPECIAL(text) else text


_SPECIAL = re.compile('[,"\r\n]').search


@cache
def _named(names: tuple[str, ...]) -> str:
    return " ".join(f"{name}=%.4g" for name in names)
