"""A sweep: runs of one recipe that differ in a few overrides, and one table of how they came out.

`RUNS/.sweeps/{utc}-{id}/sweep.json` names its members; each is a run folder like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.common.files import read_json
from superpod.common.redaction import redact_text
from superpod.errors import UserError, readable
from superpod.reports.report import Summary, summary
from superpod.reports.report_text import number_or_dash
from superpod.runtime.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.table import Table

FOLDER = ".sweeps"
"""Beside the recipes' folders, in the folder for runs; with a dot, as it holds no run."""
FILE = "sweep.json"


@dataclass(frozen=True)
class Member:
    """One run of a sweep."""

    values: dict[str, str]
    """by the path of each swept field"""
    path: Path
    summary: Summary | None
    """None where the run folder is gone or cannot be read"""
    problem: str = ""
    """why there is no summary"""

    @classmethod
    def from_run(cls, run: RunFolder) -> Member:
        """A run by itself, of no sweep: its own overrides are what it may differ in."""
        overrides = dict(text.split("=", 1) for text in run.facts.get("overrides") or () if "=" in text)
        return cls(overrides, run.path, summary(run))

    @property
    def score(self) -> tuple[bool, bool, float]:
        """For sorting: the validation loss, or else the last loss.

        Runs without either come last, and those whose last loss is no number: what they measured before is lost.
        """
        if self.summary is None:
            return True, True, 0.0
        loss = self.summary.val_loss if self.summary.val_loss is not None else self.summary.loss_end
        if self.summary.losses.bad and self.summary.loss_end is None:
            loss = None
        return False, loss is None, loss or 0.0


def is_sweep(folder: Path) -> bool:
    """Whether a folder is a sweep's."""
    return (folder / FILE).is_file()


def read_members(folder: Path) -> list[tuple[dict[str, str], Path]]:
    """The swept values and the run folder of each member, in the order in which they were queued.

    Raises:
        UserError: sweep.json cannot be read.
    """
    return parse_members(read_json(folder / FILE), folder.absolute())


def parse_members(record: object, folder: Path) -> list[tuple[dict[str, str], Path]]:
    """Parse the content of sweep.json in an absolute `folder`, which may be on another machine.

    Raises:
        UserError: the content is not that of a sweep.
    """
    rows = record.get("members") if isinstance(record, dict) else None
    if not isinstance(rows, list):
        raise UserError(f"{folder / FILE} names no runs", "look into it; the run folders beside it are whole")
    return [_member(row, folder) for row in rows]


def _member(row: object, folder: Path) -> tuple[dict[str, str], Path]:
    run, overrides = (row.get("run"), row.get("overrides")) if isinstance(row, dict) else (None, None)
    if not (run and isinstance(run, str) and isinstance(overrides, list)):
        raise UserError(f"{folder / FILE} has a member without a run and its overrides: {row!r:.200}", "look into it")
    for text in overrides:
        if not (isinstance(text, str) and "=" in text):
            raise UserError(f"{folder / FILE} has an override that is no PATH=VALUE: {text!r:.200}", "look into it")
    return dict(text.split("=", 1) for text in overrides), folder.parents[1] / run


def rank_members(folder: Path) -> list[Member]:
    """The runs of a sweep, the best first: by validation loss, or by the last loss where none was measured.

    Raises:
        UserError: as `read_members`.
    """
    result = []
    for values, path in read_members(folder):
        try:
            result.append(Member(values, path, summary(RunFolder.open(path))))
        except UserError as error:
            result.append(Member(values, path, None, str(error)))
    return sorted(result, key=lambda member: member.score)


def render(title: str, rows: list[Member]) -> Table:
    """One row a run, the best first; losses in nats per token."""
    from rich.table import Table
    from rich.text import Text

    every = dict.fromkeys(path for row in rows for path in row.values)
    paths = [path for path in every if len({row.values.get(path) for row in rows}) > 1 or len(rows) == 1]
    short = {path: path.rpartition(".")[2] for path in paths}
    names = [path if list(short.values()).count(short[path]) > 1 else short[path] for path in paths]
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    for name in (*names, "state", "steps", "loss", "val loss", "tokens/s", "hours", "run"):
        table.add_column(name, overflow="fold")
    for row in rows:
        seen = row.summary
        values = [Text(_shown(path, row.values[path]) if path in row.values else "-") for path in paths]
        run = Text(readable(f"{row.path.parent.name}/{row.path.name}"))
        if seen is None:
            table.add_row(*values, "gone", "-", "-", "-", "-", "-", run)
            continue
        table.add_row(
            *values,
            seen.status.state,
            str(seen.steps),
            number_or_dash(seen.loss_end, ".4f"),
            number_or_dash(seen.val_loss, ".4f"),
            number_or_dash(seen.tokens_per_s, ",.0f"),
            f"{seen.wall_time_s / 3600:.2f}",
            run,
        )
    return table


def _shown(path: str, value: str) -> str:
    """An override's value as it may be printed: without secrets and terminal codes."""
    return readable(redact_text(f"{path}={value}").removeprefix(f"{path}="))
