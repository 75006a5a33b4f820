"""`recipes explain`: what bounds a run, and what to try next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.cli.options import page_options
from superpod.cli.options.plan_options import PlanOptions, title, with_plan_options

if TYPE_CHECKING:
    from superpod.planner.planned_job import PlannedJob
    from superpod.planner.predict import Prediction


@with_plan_options("fabric")
def explain(options: PlanOptions, html: page_options.Html = None, trace: page_options.Trace = None) -> None:
    """Show what bounds a run, where the time of a step goes, and what to try next."""
    from superpod.planner import explain as explanations
    from superpod.planner import legality, predict

    page_options.check(html, trace)
    job = options.job()
    legality.require(job)
    prediction = predict.one(job)
    seconds = prediction.step_time_s or 0.0
    bounds, better = _bounds(job, prediction), explanations.better(job, prediction)
    if html is not None:
        from superpod.pages import plan_page

        says = (("What bounds it", bounds), ("What to try next", better))
        page_options.write_page(html, plan_page.of_layout(job, command=page_options.command(), says=says))
    if trace is not None:
        page_options.write_trace(trace, job)
    print(title(job))
    print(f"step {seconds:.3f} s, {prediction.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, MFU {prediction.mfu:.1%}")
    for key, value in sorted(prediction.terms_s.items(), key=lambda item: -item[1]):
        if value > 0.001 * seconds:
            print(f"  {value / seconds:6.1%}  {value:9.4f} s  {explanations.BOUNDS.get(key, key)}")
    for line in bounds:
        print(line)
    for line in better:
        print(f"next: {line}")


def _bounds(job: PlannedJob, prediction: Prediction) -> list[str]:
    """What takes the time, how good the pipeline is, and what a run that does not fit is short of."""
    from superpod.planner import explain as explanations

    lines = [explanations.bound(prediction), *([explanations.pipeline(job)] if job.layout.pp > 1 else [])]
    lines += explanations.stages_written(job)
    if prediction.fit != "fits":
        lines.append(f"{prediction.fit}: {explanations.short_of(job, prediction)}")
    return lines
