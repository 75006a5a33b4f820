"""Build the models of changed recipes before a run starts, with a spinner and notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from superpod.launch.display.consoles import print_plain

if TYPE_CHECKING:
    from rich.console import Console

    from superpod.requests.resolve import ResolvedRun


def require_built(runs: Sequence[ResolvedRun], *, build: bool, console: Console | None = None) -> None:
    """Build the models of all `runs` of a command; print notes on memory and skipped checks.

    `build` is False with `--no-build`. `console` is for progress and notes; None = stderr. Raises UserError if a model
    cannot be built; the message has the error of Megatron, Transformer Engine or NeMo.
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
        print_plain(console, f"note: {line}")


def _memory_note(run: ResolvedRun) -> str:
    """Return a note if the run exceeds the GPU memory or nearly does; "" if it fits."""
    planned = run.plan["layouts"][0]
    if planned.get("fit") not in ("tight", "does not fit"):
        return ""
    return (
        f"{planned['fit']}: the rank with the most memory reserves {planned['reserved_gib']:.1f} GiB on "
        f"{run.job.node.gpu.name}; `recipes check` shows how to reduce memory"
    )
