"""`recipes doctor`: check the software and hardware of this machine."""

from __future__ import annotations

from superpod.cli import tables
from superpod.cli.options.request_options import AsJson


def doctor(as_json: AsJson = False) -> None:
    """Check the software and hardware of this machine, and show the requirements of commands that are not met."""
    from superpod.launch.doctor import run_checks

    results = run_checks()
    if as_json:
        tables.print_json([vars(check) for check in results])
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    for check in results:
        mark = Text("ok", "green") if check.ok else Text("--", "yellow")
        table.add_row(mark, check.name, Text(check.detail))
        if not check.ok:
            table.add_row("", "", Text(f"needed for {check.enables}", "dim"))
            table.add_row("", "", Text(check.next, "dim"))
    tables.console().print(table)
