"""`recipes doctor`: show what is installed on this machine and what is missing."""

from __future__ import annotations

import json

from superpod.cli.options.request_options import AsJson


def doctor(as_json: AsJson = False) -> None:
    """Check the installation and the hardware of this machine, and show what each command is missing."""
    from superpod.launch.doctor import run_checks

    results = run_checks()
    if as_json:
        print(json.dumps([vars(check) for check in results], indent=1))
        return
    from rich.table import Table
    from rich.text import Text

    from superpod.cli import tables

    table = Table(box=None, pad_edge=False, show_header=False)
    for check in results:
        mark = Text("ok", "green") if check.ok else Text("--", "yellow")
        table.add_row(mark, check.name, Text(check.detail))
        if not check.ok:
            table.add_row("", "", Text(f"needed for {check.enables}", "dim"))
            table.add_row("", "", Text(check.next, "dim"))
    tables.console().print(table)
