"""Tables as wide as they need to be: a terminal scrolls or folds, but nothing is cut off."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def show(table: Table) -> None:
    """Print a table at its full width."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(highlight=False)
    needed = Measurement.get(console, console.options.update(width=1000), table).maximum
    Console(highlight=False, width=max(console.width, needed)).print(table)
