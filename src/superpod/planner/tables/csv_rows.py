"""`recipes predict`: read a CSV file of runs (columns in `published.py`), and write the predictions.

The output has a line for every row, even for invalid rows.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, NamedTuple

from superpod.common import output_file
from superpod.common.parent_death import end_with_parent
from superpod.errors import UserError
from superpod.planner import hardware as planner_hardware
from superpod.planner import predict as predicting
from superpod.planner.formats.config_files import unreadable_error
from superpod.planner.predict import Prediction, Run
from superpod.planner.rules import pipeline_layout
from superpod.planner.tables import csv_cells, header, published
from superpod.planner.tables.csv_cells import Cells

FIGURES = (
    *("verdict", "reason", "step_time_s", "tokens_per_s_per_gpu", "mfu"),
    *("allocated_gib_first", "allocated_gib_last", "allocated_gib_max", "reserved_gib_max"),
    *("step_time_low_s", "step_time_high_s", "allocated_low_gib", "allocated_high_gib"),
)
BREAKDOWN = ("terms_s", "owners_gib")
"""Columns with a breakdown, `name=value name=value`: step time by term in seconds, and memory by category in GiB."""
FIT = "fit"
"""The last column: fits, tight or does not fit, like in `plan` and `check`; the `verdict` of a tight run is ok."""
TABLE = "a CSV file with the columns of docs/planner.md"
BATCH = 10_000
"""Number of rows that are predicted at once."""


@dataclass(frozen=True)
class RowOptions:
    """Options for reading and writing rows."""

    hardware: Path | None = None
    """A hardware file with the user's GPUs, nodes and fabrics."""
    as_json: bool = False
    """Write a JSON object per row, including the layout, instead of a CSV line."""
    translate: Callable[[str], str] = str
    """Returns the name of the model that a text means; see `published.Facts`."""


PLAIN = RowOptions()


def predict(
    source: Path, out: Path, options: RowOptions = PLAIN, log: Callable[[str], None] = lambda message: None
) -> dict[str, int]:
    """Write the prediction of each row in `source` to `out`, and return outcome -> number of rows.

    `log` is called with messages about misspelt columns. After an error, `out` is unchanged.

    Raises:
        UserError: `source` is not a table of runs, or `out` cannot be written.
    """
    counts: Counter[str] = Counter()
    _check_paths(source, out)
    _load_facts(options)  # report errors in the hardware file before anything is written
    try:
        # Bytes that are not UTF-8 are written unchanged, so that a single cell cannot fail the table.
        with (
            source.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file,
            output_file.open_atomically(out, "w", newline="", encoding="utf-8", errors="surrogateescape") as sink,
        ):
            sink.write("" if options.as_json else ",".join(["id", *FIGURES, *BREAKDOWN, FIT]) + "\n")
            for lines, verdicts in _predict_batches(_read_batches(file, source, options, log)):
                sink.write(lines)
                counts.update(verdicts)
            if not counts:
                raise UserError(f"{source} has no rows", f"add a row per run below the header: {header.EXAMPLE[1]}")
    except OSError as broken:
        if broken.filename == str(source):
            raise unreadable_error(source, broken, TABLE) from broken
        raise UserError(f"{out} cannot be written: {broken.strerror}") from broken
    return dict(counts)


@cache
def _load_facts(options: RowOptions) -> published.Facts:
    """Return the hardware and model names that rows can use, including those of the hardware file in `options`."""
    hardware = planner_hardware.load(options.hardware) if options.hardware else published.builtin().hardware
    return published.Facts(hardware, options.translate)


def _check_paths(source: Path, out: Path) -> None:
    """Raise UserError if `out` is not a file name, is the input, or its folder does not exist."""
    if not out.name:
        raise UserError(f"{str(out)!r} is not a file name", "for example --out predicted.csv")
    if out.exists() and source.exists() and out.samefile(source):
        raise UserError(f"--out {out} is also the input", "choose a different name for --out")
    if source.exists() and not out.parent.is_dir():
        raise UserError(f"--out {out}: the folder {out.parent} does not exist", "create it, or choose a different one")


Batch = tuple[list[str], list[Cells], RowOptions]
"""(names of the columns, rows, options)"""


def _read_batches(file: IO[str], source: Path, options: RowOptions, log: Callable[[str], None]) -> Iterator[Batch]:
    """Yield the rows of a file in batches of BATCH rows, with the columns of its header."""
    rows = csv_cells.read(file)
    names = header.names(source, next(rows, Cells([])).values, log)
    return ((names, batch, options) for batch in iter(lambda: list(itertools.islice(rows, BATCH)), []))


def _predict_batches(batches: Iterator[Batch]) -> Iterator[tuple[str, Counter[str]]]:
    """Yield (output lines, outcome -> number of rows) of each batch, in order; several batches use all CPU cores."""
    cores = os.cpu_count() or 1
    first = list(itertools.islice(batches, 2 * cores))
    if len(first) < 2 or cores < 2:
        yield from map(_predict_batch, itertools.chain(first, batches))
        return
    from concurrent.futures import ProcessPoolExecutor

    pool = ProcessPoolExecutor(initializer=_ignore_interrupts)
    before = signal.signal(signal.SIGTERM, _exit_on_sigterm)
    try:
        pending_batches = deque(pool.submit(_predict_batch, batch) for batch in first)
        while pending_batches:
            yield pending_batches.popleft().result()
            pending_batches.extend(pool.submit(_predict_batch, batch) for batch in itertools.islice(batches, 1))
    finally:
        signal.signal(signal.SIGTERM, before)
        pool.shutdown(cancel_futures=True)


def _exit_on_sigterm(*_: object) -> None:
    """Exit on SIGTERM by an exception, so that the workers end and the incomplete file is removed."""
    raise SystemExit(128 + signal.SIGTERM)


def _ignore_interrupts() -> None:
    """Ignore Ctrl-C and SIGTERM in a worker, which ends with its parent process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()


def _predict_batch(batch: Batch) -> tuple[str, Counter[str]]:
    """Return the output lines of a batch, and outcome -> number of rows."""
    names, rows, options = batch
    table = [csv_cells.to_dict(names, row) for row in rows]
    outcomes = predict_outcomes(table, _load_facts(options))
    format_line = _format_json if options.as_json else _format_csv
    lines = "".join([format_line(row.get("id", ""), o) for row, o in zip(table, outcomes, strict=True)])
    return lines, Counter(o.prediction.outcome for o in outcomes)


class Outcome(NamedTuple):
    """The prediction for a row."""

    prediction: Prediction
    run: Run | None = None
    """The run that the row describes; None if the row is invalid."""


def predict_rows(table: Iterable[published.Row], facts: published.Facts | None = None) -> list[Prediction]:
    """Return a prediction for each row of a table, in order, even for invalid rows."""
    return [outcome.prediction for outcome in predict_outcomes(table, facts or published.builtin())]


def predict_outcomes(table: Iterable[published.Row], facts: published.Facts) -> list[Outcome]:
    """Return the prediction and the run of each row of a table, in order, even for invalid rows."""
    rows = [_parse_run(row, facts) for row in table]
    runs = [run for run in rows if isinstance(run, Run)]
    predictions = iter(_predict_runs(runs))
    return [Outcome(next(predictions), run) if isinstance(run, Run) else Outcome(run) for run in rows]


def _parse_run(row: published.Row, facts: published.Facts) -> Run | Prediction:
    """Return the run that a row describes; for an invalid row, an `illegal` or `unsupported` prediction."""
    try:
        if csv_cells.BROKEN in row:
            raise UserError(row[csv_cells.BROKEN])
        return published.run(row, facts)
    except published.Unsupported as why:
        return Prediction("unsupported", published.one_line(why))
    except UserError as why:
        return Prediction("illegal", published.one_line(why))
    except (ArithmeticError, LookupError, TypeError, ValueError, OSError, RecursionError, MemoryError) as why:
        return Prediction("illegal", f"the row cannot be read: {why}")  # a row may contain any text


def _predict_runs(runs: list[Run]) -> list[Prediction]:
    """Predict runs, in order. After an error, each half is predicted separately, to find the run that causes it."""
    try:
        return predicting.runs(runs)
    except Exception as why:  # every row of a table gets a verdict
        if len(runs) == 1:
            reason = str(why) if isinstance(why, UserError) else f"the prediction failed: {type(why).__name__}: {why}"
            return [Prediction("illegal", reason)]
        half = len(runs) // 2
        return [*_predict_runs(runs[:half]), *_predict_runs(runs[half:])]


NUMBERS = FIGURES[2:]
_GET_NUMBERS = attrgetter(*NUMBERS)
_NUMBERS_FORMAT = ",".join(["%.6g"] * len(NUMBERS))
_NO_FIGURES = "," * (len(NUMBERS) + len(BREAKDOWN) - 1)


def _format_csv(name: str, outcome: Outcome) -> str:
    """Format a CSV line of the output; csv.writer would take as long as the prediction."""
    p = outcome.prediction
    head = f"{_quote(name)},{p.verdict},{_quote(_reason(p))}"
    if p.step_time_s is None:
        return f"{head},{_NO_FIGURES},{p.fit or ''}\n"
    numbers = _NUMBERS_FORMAT % _GET_NUMBERS(p)
    terms, owners = (_breakdown_format(tuple(part)) % tuple(part.values()) for part in (p.terms_s, p.owners_gib))
    return f"{head},{numbers},{terms},{owners},{p.fit or ''}\n"


def _format_json(name: str, outcome: Outcome) -> str:
    """Format a JSON line of the output: the CSV columns, and for a legal run its layout, also in Megatron's syntax."""
    p, run = outcome.prediction, outcome.run
    figures = {key: getattr(p, key) for key in (*FIGURES, *BREAKDOWN, FIT)} | {"reason": _reason(p)}
    layout: dict[str, Any] = {}
    if run is not None and p.step_time_s is not None:
        layout = {"layout": asdict(run.job.layout), "pipeline_layout": pipeline_layout.from_job(run.job)}
    return json.dumps({"id": name, **figures, **layout}) + "\n"


def _reason(p: Prediction) -> str:
    """Return the reason of a prediction and its warning of extrapolation in one text."""
    return "; ".join(filter(None, [p.reason, p.extrapolation]))


def _quote(text: str) -> str:
    """Quote a CSV cell according to RFC 4180, if necessary."""
    return '"' + text.replace('"', '""') + '"' if _SPECIAL(text) else text


_SPECIAL = re.compile('[,"\r\n]').search


@cache
def _breakdown_format(names: tuple[str, ...]) -> str:
    """Return the format string of a breakdown: `compute=%.4g tp=%.4g`."""
    return " ".join(f"{name}=%.4g" for name in names)
