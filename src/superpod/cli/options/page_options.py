"""The options `--html` and `--trace`: the paths are checked before planning, and the files written after it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from superpod.planner.planned_job import PlannedJob

Html = Annotated[Path | None, typer.Option("--html", help="Also write an HTML page with charts: FILE.html.")]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", help="Also write the predicted step as a Perfetto trace: FILE.json or FILE.json.gz."),
]


def check(html: Path | None, trace: Path | None = None) -> None:
    """Check that the requested files can be written.

    Raises:
        UserError: a path is unsuitable, or Bokeh, which draws the plots, is not installed.
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
    """Return the command line of this process, quoted for the shell."""
    return shlex.join(["recipes", *sys.argv[1:]])


def write_page(path: Path, text: str) -> None:
    """Write an HTML page and print its path on stderr."""
    from superpod.pages import target

    target.write(path, text, "--html")
    print(f"wrote {path}: {len(text) / 1e6:.1f} MB, self-contained, opens in any browser", file=sys.stderr)


def write_trace(path: Path, job: PlannedJob) -> None:
    """Write a trace of the predicted step of a legal run and print its path on stderr.

    Raises:
        UserError: the pipeline schedule deadlocks.
    """
    from superpod.cli.options.plan_options import job_title
    from superpod.pages import step_timeline, target, trace

    step = step_timeline.simulate_step(job)
    target.write(path, trace.render_trace(job, step, title=job_title(job), command=command()), "--trace")
    print(
        f"wrote {path}: {step.step_s:.3f} s, {step.ranks} tracks; open it at https://ui.perfetto.dev", file=sys.stderr
    )
