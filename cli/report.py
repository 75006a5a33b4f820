"""`recipes report`: the results of a run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.cli.request_options import AsJson, Run

if TYPE_CHECKING:
    from superpod.node.run_folder import RunFolder


def report(run: Run, as_json: AsJson = False) -> None:
    """Summarize a run: losses, throughput, memory, how it ended; draw loss.png in its folder. A sweep: a row a run."""
    from superpod.lifecycle import sweep
    from superpod.node.run_folder import RunFolder

    if sweep.is_sweep(Path(run)):
        _report_sweep(Path(run), as_json)
        return
    folder = RunFolder.open(run)
    if not as_json:
        print_report(folder)
        return
    from superpod.lifecycle.report import summary

    print(json.dumps(dataclasses.asdict(summary(folder)), indent=1, default=str))


def _report_sweep(folder: Path, as_json: bool) -> None:
    from superpod.cli import tables
    from superpod.lifecycle import sweep

    rows = sweep.members(folder)
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1, default=str))
        return
    tables.show(sweep.render(folder, rows))
    for row in rows:
        if row.problem:
            print(f"{row.path}: {row.problem}")


def print_report(folder: RunFolder) -> None:
    """Print the report of a run; draw its loss curve into its folder if it is this user's own and has metrics."""
    from rich.console import Console

    from superpod.lifecycle.report import loss_curve, render, summary
    from superpod.node import owner

    console = Console()
    console.print(render(summary(folder)))
    if folder.metrics() and owner.is_mine(folder.path):
        try:
            curve = loss_curve(folder, folder.path / "loss.png")
            console.print(f"loss curve {curve}", markup=False, highlight=False, soft_wrap=True)
        except (OSError, ModuleNotFoundError) as error:
            console.print(f"no loss curve: {error}", markup=False, highlight=False)
