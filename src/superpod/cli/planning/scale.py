"""`recipes scale`: predict throughput for several cluster sizes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import tables
from superpod.cli.options import page_options
from superpod.cli.options.plan_options import PlanOptions, with_plan_options
from superpod.cli.options.request_options import AsJson
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.planner.scaling import Point


@with_plan_options("layout", "nodes", "task", "fabric")
def scale(
    options: PlanOptions,
    gpus: Annotated[str, typer.Option("--gpus", help="Numbers of GPUs to compare.")] = "8,16,32,64,128,256,512,1024",
    as_json: AsJson = False,
    html: page_options.Html = None,
) -> None:
    """Predict throughput for several cluster sizes, with the best layout for each.

    Strong scaling keeps the global batch size; weak scaling keeps the batch size per GPU.
    """
    from superpod.planner import scaling

    page_options.check(html)
    sizes = _parse_sizes(gpus)
    is_auto = options.precision == "auto"
    job = options.job_to_search(gpus=sizes[0], precision=None if is_auto else options.precision)
    points = scaling.table(job, sizes, auto=is_auto)
    if html is not None:
        from superpod.pages import sizes_page

        page_options.write_page(html, sizes_page.render_scale(job, points, command=page_options.command()))
    if as_json:
        tables.print_json([scaling.as_json(point) for point in points])
    else:
        _print_table(points)


def _print_table(points: list[Point]) -> None:
    from superpod.planner import explain

    titles = ("scaling", "GPUs", "gbs", "step s", "tokens/s", "tokens/s/GPU", "efficiency %", "layout")
    rows = []
    for p in points:
        if p.seconds is None or p.layout is None:
            figures = ("-", "-", "-", "-", p.reason)
        else:
            figures = (
                p.step_time,
                f"{p.tokens_per_s:,.0f}",
                f"{p.tokens_per_s / p.gpus:,.0f}",
                f"{100 * p.efficiency:.1f}",
                f"{explain.title(p.layout)}, {p.precision}",
            )
        rows.append((p.kind, f"{p.gpus:,}", f"{p.gbs:,}", *figures))
    tables.print_rows(titles, rows, right=range(1, 7))
    for line in dict.fromkeys(p.extrapolation for p in points if p.extrapolation):
        tables.print_wrapped(f"- {line}")


def _parse_sizes(text: str) -> list[int]:
    """Return the distinct numbers of GPUs in a text such as 64,128, sorted. Raises UserError for other texts."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(re.fullmatch(r"[0-9]{1,9}", part) and int(part) for part in parts):
        raise UserError(f"--gpus must be a list of numbers, not {text!r}", "for example 64,128,256")
    return sorted({int(part) for part in parts})
