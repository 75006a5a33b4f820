"""Builds the models of changed recipes before a run starts, with a progress line and notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from superpod.requests.resolve import ResolvedRun


def require_built(runs: Sequence[ResolvedRun], *, build: bool, console: Console | None = None) -> None:
    """Refuse runs whose models cannot be built, as `recipes check` does; print notes on memory and skipped checks.

    Args:
        runs: all runs of a command.
        build: False with `--no-build`.
        console: console for progress and notes; None = stderr.

    Raises:
        UserError: a model cannot be built; the message gives the errors of Megatron, Transformer Engine or NeMo.
    """
    from superpod.launch.display.progress_bar import spinner, stderr_console
    from superpod.rehearsal import validation

    console = console or stderr_console()
    if not build or all(validation.is_cached(run) for run in runs):
        notes = validation.require(runs, build=build)
    else:
        with spinner(console, "building the models of three ranks (20 s, once; --no-build skips it)"):
            notes = validation.require(runs)
    memory_notes = dict.fromkeys(note for note in map(_memory_note, runs) if note)
    for line in (*memory_notes, *notes):
        console.print(f"note: {line}", markup=False, highlight=False, soft_wrap=True)


def _memory_note(run: ResolvedRun) -> str:
    """Return a note if the run fits in memory only tightly or not at all, else ""."""
    planned = run.plan["layouts"][0]
    if planned.get("fit") not in ("tight", "does not fit"):
        return ""
    return (
        f"{planned['fit']}: the rank with the most memory reserves {planned['reserved_gib']:.1f} GiB on "
        f"{run.job.node.gpu.name}; `recipes check` shows how to reduce memory"
    )
