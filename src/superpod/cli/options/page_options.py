"""The options `--html` and `--trace`. Their paths are checked before planning; the files are written afterwards."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from superpod.planner.planned_job import PlannedJob

Html = Annotated[Path | None, typer.Option("--html", help="Write an HTML page with charts to this .html file.")]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", help="Write the predicted step as a Perfetto trace to this .json or .json.gz file."),
]


def check(html: Path | None, trace: Path | None = None) -> None:
    """Check that the files of --html and --trace can be written; None = not requested.

    Raises:
        UserError: a path has the wrong suffix or is not writable, or Bokeh, which draws the plots, is not installed.
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
    print(f"wrote {path} ({len(text) / 1e6:.1f} MB, self-contained); open it in any browser", file=sys.stderr)


def write_trace(path: Path, job: PlannedJob) -> None:
    """Write a Perfetto trace of one predicted step of a job with a legal layout, and print its path on stderr.

    Raises:
        UserError: the pipeline schedule deadlocks.
    """
    from superpod.cli.options.plan_options import job_title
    from superpod.pages import step_timeline, target, trace

    step = step_timeline.simulate_step(job)
    target.write(path, trace.render_trace(job, step, title=job_title(job), command=command()), "--trace")
    print(f"wrote {path} ({step.step_s:.3f} s, {step.ranks} tracks); open in https://ui.perfetto.dev", file=sys.stderr)
