"""`recipes explain`: what bounds a run, and what to try next."""

from __future__ import annotations

from superpod.cli.plan_options import PlanOptions, title, with_plan_options


@with_plan_options("fabric")
def explain(options: PlanOptions) -> None:
    """Show what bounds a run, where the time of a step goes, and what to try next."""
    from superpod.planner import explain as explanations
    from superpod.planner import legality, predict

    job = options.job()
    legality.require(job)
    prediction = predict.one(job)
    seconds = prediction.step_time_s or 0.0
    print(title(job))
    print(f"step {seconds:.3f} s, {prediction.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, MFU {prediction.mfu:.1%}")
    for key, value in sorted(prediction.terms_s.items(), key=lambda item: -item[1]):
        if value > 0.001 * seconds:
            print(f"  {value / seconds:6.1%}  {value:9.4f} s  {explanations.BOUNDS.get(key, key)}")
    print(explanations.bound(prediction))
    if job.layout.pp > 1:
        print(explanations.pipeline(job))
    if prediction.verdict == "oom" or prediction.tight:
        print(f"{'tight' if prediction.tight else 'does not fit'}: {explanations.short_of(job, prediction)}")
    for line in explanations.better(job, prediction):
        print(f"next: {line}")
