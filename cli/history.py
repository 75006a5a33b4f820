"""`recipes history`: the attempts of a run."""

from __future__ import annotations

import time

from superpod.cli import tables
from superpod.cli.request_options import Run


def history(run: Run) -> None:
    """List the attempts of a run: when and where each ran, how far it got, and how it ended."""
    from rich.table import Table

    from superpod.node.run_folder import RunFolder

    folder = RunFolder.open(run)
    head = ("attempt", "job", "began", "took", "nodes", "to step", "checkpoint", "state", "why")
    table = Table(*head, box=None, pad_edge=False, header_style="bold")
    for attempt in folder.attempts:
        result = attempt.result
        began = float(result.get("started") or 0)
        took = float(result.get("ended") or attempt.heartbeat().get("t") or began) - began
        nodes = result.get("nodes") or []
        table.add_row(
            attempt.name,
            str(result.get("job", "")) + (f" (restart {result['restarts']})" if result.get("restarts") else ""),
            time.strftime("%m-%d %H:%M:%S", time.localtime(began)),
            tables.ago(took),
            nodes[0] if len(nodes) == 1 else f"{nodes[0]} +{len(nodes) - 1}" if nodes else "-",
            str(result.get("last_step", "-")),
            str(result.get("checkpoint") or "-"),
            str(result.get("state", "?")),
            str(result.get("message", "")),
        )
    tables.show(table)
