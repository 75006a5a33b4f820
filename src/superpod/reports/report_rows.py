"""Several runs beside each other: a row a run, as text."""

from __future__ import annotations

from collections.abc import Sequence

from superpod.reports.report_figures import Figures
from superpod.reports.runs.run_record import Record

TITLES = (
    *("run", "source", "steps", "loss", "val loss", "p50 s", "p99 s", "tokens/s/GPU", "MFU %", "GiB", "goodput %"),
)


def rows(reported: Sequence[tuple[Record, Figures]]) -> list[list[str]]:
    """A row for each run, of TITLES; `-` for what is not known."""
    return [
        [
            run.name,
            run.source,
            f"{figures.steps:,}",
            number_or_dash(figures.loss_end, ".4f"),
            number_or_dash(figures.val_loss, ".4f"),
            number_or_dash(figures.step_s.get("p50"), ".3g"),
            number_or_dash(figures.step_s.get("p99"), ".3g"),
            number_or_dash(None if run.rehearsal else figures.rate, ",.0f"),
            number_or_dash(None if figures.mfu is None else 100 * figures.mfu, ".1f"),
            number_or_dash(figures.peak_gib, ".2f"),
            number_or_dash(None if figures.goodput is None else 100 * figures.goodput, ".1f"),
        ]
        for run, figures in reported
    ]


def number_or_dash(value: float | None, form: str) -> str:
    """The number in a format of Python's, `-` where it is not known."""
    return "-" if value is None else f"{value:{form}}"
