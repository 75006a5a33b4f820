"""Builds the models of changed recipes before a job, with a progress line and notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from superpod.requests.resolve import ResolvedRun


def require_built(runs: Sequence[ResolvedRun], *, build: bool, console: Console | None = None) -> None:
    """Refuse runs whose models cannot be built, as `recipes check` does; print notes on memory and skipped checks.

    Args:
        runs: of one command.
        build: False with `--no-build`.
        console: default: stderr.

    Raises:
        UserError: with the errors of Megatron, Transformer Engine or NeMo.
    """
    from superpod.cli.running.progress import on_stderr, waiting
    from superpod.rehearsal import validation

    console = console or on_stderr()
    if not build or all(validation.is_cached(run) for run in runs):
        notes = validation.require(runs, build=build)
    else:
        with waiting(console, "building the models of three ranks (20 s, once; --no-build skips it)"):
            notes = validation.require(runs)
    for line in (*dict.fromkeys(filter(None, map(_of_memory, runs))), *notes):
        console.print(f"note: {line}", markup=False, highlight=False, soft_wrap=True)


def _of_memory(run: ResolvedRun) -> str:
    """A note if the run is tight or does not fit; "" = it fits."""
    planned = run.plan["layouts"][0]
    if planned.get("fit") not in ("tight", "does not fit"):
        return ""
    return (
        f"{planned['fit']}: {planned['reserved_gib']:.1f} GiB are reserved on the fullest rank of "
        f"{run.job.node.gpu.name}; `recipes check` says what frees memory"
    )
