"""`recipes memory`: show a breakdown of the predicted peak memory per pipeline rank."""

from __future__ import annotations

from string import ascii_letters
from typing import TYPE_CHECKING

from superpod.cli import tables
from superpod.cli.options import page_options
from superpod.cli.options.plan_options import PlanOptions, job_title, with_plan_options
from superpod.cli.options.request_options import AsJson

if TYPE_CHECKING:
    from superpod.planner.planned_job import PlannedJob

BAR_WIDTH = 48
"""Width of a full bar in characters."""
SHADES = ("bright_blue", "cyan", "green", "yellow", "magenta", "red", "bright_black", "white")


@with_plan_options("fabric")
def memory(options: PlanOptions, as_json: AsJson = False, html: page_options.Html = None) -> None:
    """Show a breakdown of the predicted peak memory per pipeline rank: weights, optimizer states, activations, ..."""
    from superpod.planner import columns, legality, plans
    from superpod.planner import memory as model

    page_options.check(html)
    job = options.job()
    legality.require(job)
    if html is not None:
        from superpod.pages import plan_page

        page_options.write_page(html, plan_page.render_layout(job, command=page_options.command()))
    stages = plans.stages(job)
    limit, reserved = model.limit(job), model.reserved(job, columns.from_job(job))
    if as_json:
        reserved_bytes = [round(float(r)) for r in reserved]
        tables.print_json({"usable_bytes": round(limit), "stages": stages, "reserved_bytes": reserved_bytes})
        return
    _print_bars(job, stages, limit, [float(r) for r in reserved])


def _print_bars(job: PlannedJob, stages: list[dict], limit: float, reserved: list[float]) -> None:
    """Print a bar per stage of `plans.stages`. `limit` is the usable memory in bytes, `reserved` that of each rank."""
    from rich.text import Text

    from superpod.planner.hardware import GIB

    console = tables.console()
    console.print(job_title(job), soft_wrap=True, markup=False)
    peaks = {key: max(stage["bytes"][key] for stage in stages) for key in stages[0]["bytes"]}
    categories = sorted((key for key in peaks if peaks[key] > 0), key=lambda key: -peaks[key])
    letters = _category_letters(categories)
    color = {key: SHADES[min(i, len(SHADES) - 1)] for i, key in enumerate(categories)}
    widest = max(limit, *reserved)
    for stage in stages:
        bar, used, reserved_on_rank = Text(f"rank {stage['rank']:>3} "), 0.0, reserved[stage["rank"]]
        for key in categories:
            start = round(used / widest * BAR_WIDTH)
            used += stage["bytes"][key]
            bar.append(letters[key] * (round(used / widest * BAR_WIDTH) - start), color[key])
        end = round(used / widest * BAR_WIDTH)
        bar.append("." * (round(reserved_on_rank / widest * BAR_WIDTH) - end), "bright_black")
        mark = round(limit / widest * BAR_WIDTH)
        bar.append(" " * max(0, mark - len(bar) + 9) + "|")
        over = "  over" if reserved_on_rank > limit else ""
        bar.append(f" {used / GIB:6.1f} GiB allocated, {reserved_on_rank / GIB:6.1f} reserved{over}")
        console.print(bar, soft_wrap=True)
    console.print(f"| = {limit / GIB:.1f} GiB usable; . = reserved but not allocated")
    console.print(f"allocated on rank {stages[0]['rank']}:")
    for key in categories:
        size = stages[0]["bytes"][key] / GIB
        console.print(Text(f"  {letters[key]} ", color[key]) + Text(f"{key.replace('_', ' '):<14} {size:8.2f} GiB"))


def _category_letters(categories: list[str]) -> dict[str, str]:
    """Return a distinct letter per category, for terminals without color: the first unused letter of its name."""
    letters: dict[str, str] = {}
    for category in categories:
        letters[category] = next(c for c in (*category, *ascii_letters) if c not in letters.values())
    return letters
