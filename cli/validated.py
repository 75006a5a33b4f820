"""The validation that every command makes before a job: the models of a changed recipe are built, and it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from superpod.lifecycle.resolve import ResolvedRun


def require_built(runs: Sequence[ResolvedRun], *, build: bool, console: Console | None = None) -> None:
    """Refuse runs whose models cannot be built, as `recipes check` does; print what was not checked.

    `console` shows both; default: stderr.

    Raises:
        UserError: with what Megatron, Transformer Engine or NeMo refuse.
    """
    from superpod.cli.progress import on_stderr, waiting
    from superpod.rehearsal import validation

    console = console or on_stderr()
    if not build or all(validation.is_cached(run) for run in runs):
        notes = validation.require(runs, build=build)
    else:
        with waiting(console, "building the models of three ranks (20 s, once; --no-build leaves it out)"):
            notes = validation.require(runs)
    for line in (*dict.fromkeys(filter(None, map(_of_memory, runs))), *notes):
        console.print(f"note: {line}", markup=False, highlight=False, soft_wrap=True)


def _of_memory(run: ResolvedRun) -> str:
    """What the plan says of memory where it is not a plain fit; "" = it fits."""
    planned = run.plan["layouts"][0]
    if planned.get("fit") not in ("tight", "does not fit"):
        return ""
    return (
        f"{planned['fit']}: {planned['reserved_gib']:.1f} GiB are reserved on the fullest rank of "
        f"{run.job.node.gpu.name}; `recipes check` says what frees memory"
    )
