"""`recipes history`: list the attempts of a run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from superpod.cli import tables
from superpod.cli.options.request_options import AsJson, Run
from superpod.errors import readable

if TYPE_CHECKING:
    from superpod.reports.runs.attempts import AttemptView


def history(run: Run, as_json: AsJson = False) -> None:
    """List the attempts of a run: time, nodes, first and last step, checkpoint, state and reason of the end."""
    from superpod.reports.runs import attempts
    from superpod.runtime.runs.run_folder import RunFolder

    views = attempts.read_attempts(RunFolder.open(run))
    if as_json:
        tables.print_json([dataclasses.asdict(view) for view in views])
        return
    _print_table(views)


def _print_table(views: list[AttemptView]) -> None:
    rows = []
    for view in views:
        job = f"{view.job} (restart {view.restarts})" if view.restarts else view.job
        began = "-" if view.began is None else time.strftime("%m-%d %H:%M:%S", time.localtime(view.began))
        cells = (
            view.attempt,
            job,
            began,
            tables.format_duration(view.took_s),
            _format_nodes(view.nodes),
            "-" if view.resumed_step is None else str(view.resumed_step),
            "-" if view.last_step is None else str(view.last_step),
            str(view.checkpoint or "-"),
            view.state,
            "; ".join(text for text in (view.message, *view.notes) if text),
        )
        rows.append([readable(cell) for cell in cells])
    titles = ("attempt", "job", "began", "took", "nodes", "from", "to step", "checkpoint", "state", "why")
    tables.print_rows(titles, rows)


def _format_nodes(nodes: Sequence[str]) -> str:
    """Return the first node and the number of others, such as "node1 +3"; "-" for no node."""
    if not nodes:
        return "-"
    return nodes[0] if len(nodes) == 1 else f"{nodes[0]} +{len(nodes) - 1}"
