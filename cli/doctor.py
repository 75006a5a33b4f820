"""`recipes doctor`."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def doctor(as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """Say what is installed, what this machine has, and what is missing for which verb."""
    from superpod.launchers.doctor import checks

    found = checks()
    if as_json:
        print(json.dumps([vars(check) for check in found], indent=1))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    for check in found:
        mark = Text("ok", "green") if check.ok else Text("--", "yellow")
        table.add_row(mark, check.name, Text(check.found))
        if not check.ok:
            table.add_row("", "", Text(f"for {check.enables}", "dim"))
            table.add_row("", "", Text(check.next, "dim"))
    Console().print(table)
