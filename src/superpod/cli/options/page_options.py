"""`--html` and `--trace` of the planning verbs: checked before the work, written after it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from superpod.planner.planned_job import PlannedJob

Html = Annotated[Path | None, typer.Option("--html", help="Also write it as a page with figures: FILE.html.")]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", help="Also write the predicted step for Perfetto: FILE.json, or FILE.json.gz."),
]


def check(html: Path | None, trace: Path | None = None) -> None:
    """Check that the files can be written, and the page drawn.

    Raises:
        UserError: a path does not do, or Bokeh is not installed.
    """
    if html is None and trace is None:
        return
    from superpod.pages import target

    if html is not None:
        from superpod.pages.page import require_bokeh

        require_bokeh()
        target.check(html, "--html", target.PAGE)
    if trace is not None:
        target.check(trace, "--trace", target.TRACE)


def command() -> str:
    """The command line that is running, to be repeated."""
    return shlex.join(["recipes", *sys.argv[1:]])


def write_page(path: Path, text: str) -> None:
    """Write a page, and say so on stderr."""
    from superpod.pages import target

    target.write(path, text, "--html")
    print(f"wrote {path}: {len(text) / 1e6:.1f} MB, opens in a browser without a network", file=sys.stderr)


def write_trace(path: Path, job: PlannedJob) -> None:
    """Write the predicted step of a legal run as a trace, and say so on stderr.

    Raises:
        UserError: its schedule cannot be run.
    """
    from superpod.cli.options.plan_options import title
    from superpod.pages import step_timeline, target, trace

    step = step_timeline.of(job)
    target.write(path, trace.text(job, step, title=title(job), command=command()), "--trace")
    print(f"wrote {path}: {step.step_s:.3f} s, {step.ranks} tracks, for https://ui.perfetto.dev", file=sys.stderr)
