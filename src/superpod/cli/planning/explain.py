"""`recipes explain`: show the bottleneck of a layout and how to improve it."""

from __future__ import annotations

from superpod.cli.options import page_options
from superpod.cli.options.plan_options import PlanOptions, job_title, with_plan_options


@with_plan_options("fabric")
def explain(options: PlanOptions, html: page_options.Html = None, trace: page_options.Trace = None) -> None:
    """Show a breakdown of the step time of a layout, its bottleneck, and faster alternatives."""
    from superpod.planner import explain as explanations
    from superpod.planner import legality, predict, suggestions

    page_options.check(html, trace)
    job = options.job()
    legality.require(job)
    prediction = predict.one(job)
    seconds = prediction.step_time_s or 0.0
    shortage = ""
    if prediction.fit != "fits":
        shortage = f"{prediction.fit}: {suggestions.describe_shortage(job, prediction)}"
    pipeline = [explanations.pipeline(job)] if job.layout.pp > 1 else []
    bounds = [explanations.bound(prediction), *pipeline, *explanations.pipeline_layout_lines(job)]
    better = suggestions.faster_changes(job, prediction)
    if html is not None:
        from superpod.pages import plan_page

        sections = (("Bottleneck", [*filter(None, [shortage]), *bounds]), ("What to try next", better))
        page_options.write_page(
            html, plan_page.render_layout(job, command=page_options.command(), explanations=sections)
        )
    if trace is not None:
        page_options.write_trace(trace, job)
    print(job_title(job))
    if shortage:
        print(shortage)
    condition = "with enough memory: " if prediction.fit == "does not fit" else ""
    speed = f"{prediction.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, MFU {prediction.mfu:.1%}"
    print(f"{condition}step {prediction.step_time}, {speed}")
    for key, value in sorted(prediction.terms_s.items(), key=lambda item: -item[1]):
        if value > 0.001 * seconds:
            print(f"  {value / seconds:6.1%}  {value:9.4f} s  {explanations.BOUNDS.get(key, key)}")
    for line in bounds:
        print(line)
    if prediction.extrapolation:
        print(prediction.extrapolation)
    for line in better:
        print(f"next: {line}")
