"""Sweeps: runs of one recipe that differ in a few overrides, and the table that compares them.

`RUNS/.sweeps/{utc}-{id}/sweep.json` lists the members; each member is an ordinary run folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.common.json_files import read_json
from superpod.common.redaction import redact_text
from superpod.errors import UserError, readable
from superpod.reports.report import Summary, summary
from superpod.reports.report_text import number_or_dash
from superpod.runtime.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.table import Table

FOLDER = ".sweeps"
"""Folder in the folder of runs. It begins with a dot, so that it is not listed as a recipe."""
FILE = "sweep.json"


@dataclass(frozen=True)
class Member:
    """A run of a sweep, or a run to compare with others."""

    values: dict[str, str]
    """path of each swept field -> its value"""
    path: Path
    summary: Summary | None
    """None if the run folder is missing or unreadable"""
    problem: str = ""
    """why there is no summary"""

    @classmethod
    def from_run(cls, run: RunFolder) -> Member:
        """Create the table row of a run that is not part of a sweep; its values are the overrides of the run."""
        overrides = dict(text.split("=", 1) for text in run.facts.get("overrides") or () if "=" in text)
        return cls(overrides, run.path, summary(run))

    @property
    def score(self) -> tuple[bool, bool, float]:
        """Sort key, best first: the validation loss, or else the last training loss.

        Runs without a loss, and runs whose last loss is non-finite, come last.
        """
        if self.summary is None:
            return True, True, 0.0
        loss = self.summary.val_loss if self.summary.val_loss is not None else self.summary.loss_end
        if self.summary.losses.bad and self.summary.loss_end is None:
            loss = None
        return False, loss is None, loss or 0.0


def is_sweep(folder: Path) -> bool:
    """Return whether a folder contains sweep.json."""
    return (folder / FILE).is_file()


def read_members(folder: Path) -> list[tuple[dict[str, str], Path]]:
    """Return (swept values, run folder) of each run in sweep.json. Raises UserError if the file is invalid."""
    return parse_members(read_json(folder / FILE), folder.absolute())


def parse_members(record: object, folder: Path) -> list[tuple[dict[str, str], Path]]:
    """Return (swept values, run folder) of each run in sweep.json of `folder`. Raises UserError if it is invalid."""
    rows = record.get("members") if isinstance(record, dict) else None
    if not isinstance(rows, list):
        raise UserError(f"{folder / FILE} has no list of members", "fix or delete it; the run folders are intact")
    return [_parse_member(row, folder) for row in rows]


def _parse_member(row: object, folder: Path) -> tuple[dict[str, str], Path]:
    run, overrides = (row.get("run"), row.get("overrides")) if isinstance(row, dict) else (None, None)
    if not (run and isinstance(run, str) and isinstance(overrides, list)):
        raise UserError(f"{folder / FILE} has a member without run or overrides: {row!r:.200}", "fix the file")
    for text in overrides:
        if not (isinstance(text, str) and "=" in text):
            raise UserError(f"{folder / FILE} has an override that is not PATH=VALUE: {text!r:.200}", "fix the file")
    return dict(text.split("=", 1) for text in overrides), folder.parents[1] / run


def rank_members(folder: Path) -> list[Member]:
    """Return the runs of a sweep, best first (see `Member.score`). Raises UserError if sweep.json is invalid."""
    members = []
    for values, path in read_members(folder):
        try:
            members.append(Member(values, path, summary(RunFolder.open(path))))
        except UserError as error:
            members.append(Member(values, path, None, str(error)))
    return sorted(members, key=lambda member: member.score)


def render(title: str, members: list[Member]) -> Table:
    """Return a table with a row per run, in the given order. Losses are in nats per token."""
    from rich.table import Table
    from rich.text import Text

    # Only fields that differ between the runs, without the path where the name is unique.
    fields = dict.fromkeys(path for member in members for path in member.values)
    fields = [field for field in fields if len(members) == 1 or len({m.values.get(field) for m in members}) > 1]
    last_names = [field.rpartition(".")[2] for field in fields]
    headings = [field if last_names.count(name) > 1 else name for field, name in zip(fields, last_names, strict=True)]

    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    for name in (*headings, "state", "steps", "loss", "val loss", "tokens/s", "hours", "run"):
        table.add_column(name, overflow="fold")
    for member in members:
        values = [
            Text(_format_value(field, member.values[field]) if field in member.values else "-") for field in fields
        ]
        run = Text(readable(f"{member.path.parent.name}/{member.path.name}"))
        figures = member.summary
        if figures is None:
            table.add_row(*values, "gone", "-", "-", "-", "-", "-", run)
            continue
        table.add_row(
            *values,
            figures.status.state,
            str(figures.steps),
            number_or_dash(figures.loss_end, ".4f"),
            number_or_dash(figures.val_loss, ".4f"),
            number_or_dash(figures.tokens_per_s, ",.0f"),
            f"{figures.wall_time_s / 3600:.2f}",
            run,
        )
    return table


def _format_value(path: str, value: str) -> str:
    """Return the value of the override `path`=`value` without secrets and control characters."""
    return readable(redact_text(f"{path}={value}").removeprefix(f"{path}="))
