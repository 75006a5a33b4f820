"""`recipes cost`: days, energy and money of a whole training."""

from __future__ import annotations

import json
import re
from typing import Annotated

import typer

from superpod.cli.plan_options import PlanOptions, with_plan_options
from superpod.cli.request_options import AsJson
from superpod.errors import UserError

UNITS = {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12}


@with_plan_options("task", "option", "fabric")
def cost(
    tokens: Annotated[str, typer.Option("--tokens", help="Tokens of the training: 15T, 300B, 2e12.")],
    price: Annotated[float | None, typer.Option("--price", help="Price of a GPU-hour.")] = None,
    pue: Annotated[float, typer.Option("--pue", help="Power of the building over that of the nodes.")] = 1.0,
    goodput: Annotated[float, typer.Option("--goodput", help="Share of the wall time that trains.")] = 1.0,
    *,
    options: PlanOptions,
    as_json: AsJson = False,
) -> None:
    """Compute days, GPU-hours, energy and money of a token budget; a model without --layout gets its best one."""
    from superpod.planner import cost as costs
    from superpod.planner import explain, legality, plans, predict

    job = options.job()
    if options.layout is None and not options.is_recipe:
        job = plans.best(job)
    legality.require(job)
    prediction = predict.one(job)
    rate = prediction.tokens_per_s_per_gpu or 0.0
    total = costs.of(
        job.node, job.gpus, tokens=_tokens(tokens), tokens_per_s_per_gpu=rate, price=price, pue=pue, goodput=goodput
    )
    if as_json:
        print(json.dumps({"layout": vars(job.layout), "tokens_per_s_per_gpu": rate, **vars(total)}, indent=1))
        return
    print(
        f"{job.model.name}, {job.gpus:,} x {job.node.gpu.name}: {explain.title(job.layout)}, {rate:,.0f} tokens/s/GPU"
    )
    if prediction.verdict == "oom":
        print(f"it does not fit: {explain.short_of(job, prediction)}")
    print(f"{total.days:,.1f} days, {total.gpu_hours:,.0f} GPU-hours, {total.energy_mwh:,.0f} MWh at full power")
    if total.money is not None:
        print(f"{total.money:,.0f} at {price:g} per GPU-hour")
    if prediction.verdict == "oom":
        raise typer.Exit(2)


def _tokens(text: str) -> float:
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([MBT]?)", text.strip(), re.IGNORECASE)
    try:
        return float(match[1]) * UNITS[match[2].upper()]  # type: ignore[index]
    except (TypeError, ValueError, KeyError):
        raise UserError(f"--tokens is {text!r}; it is a number, such as 15T, 300B or 2e12") from None
