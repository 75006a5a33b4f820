"""`recipes scale` and `recipes cost`: more GPUs, and a whole training."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

import typer

from superpod.cli import subject, tables
from superpod.cli.subject import Said
from superpod.errors import UserError

UNITS = {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12}


@subject.about("layout", "nodes", "task", "fabric")
def scale(
    said: Said,
    gpus: Annotated[str, typer.Option("--gpus", help="Sizes, such as 64,128,256.")] = "8,16,32,64,128,256,512,1024",
    as_json: subject.AsJson = False,
) -> None:
    """Throughput over cluster sizes, the best layout at each: strong scaling (one batch) and weak (batch per GPU)."""
    from superpod.planner import scaling

    sizes = _sizes(gpus)
    points = scaling.table(said.job(gpus=sizes[0]), sizes)
    if as_json:
        print(json.dumps([scaling.as_json(point) for point in points], indent=1))
    else:
        _show(points)


def _show(points: list[Any]) -> None:
    from rich.table import Table

    from superpod.planner import explain

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("scaling", "GPUs", "gbs", "step s", "tokens/s", "tokens/s/GPU", "efficiency %"):
        table.add_column(title, justify="left" if title == "scaling" else "right", no_wrap=True)
    table.add_column("layout", no_wrap=True)
    for p in points:
        if p.seconds is None:
            table.add_row(p.kind, f"{p.gpus:,}", f"{p.gbs:,}", "-", "-", "-", "-", p.reason)
            continue
        figures = (f"{p.seconds:.3f}", f"{p.tokens_per_s:,.0f}", f"{p.tokens_per_s / p.gpus:,.0f}")
        row = (f"{100 * p.efficiency:.1f}", explain.title(p.layout))
        table.add_row(p.kind, f"{p.gpus:,}", f"{p.gbs:,}", *figures, *row)
    tables.show(table)


@subject.about("task", "option", "fabric")
def cost(
    tokens: Annotated[str, typer.Option("--tokens", help="Of the training: 15T, 300B, 2e12.")],
    price: Annotated[float | None, typer.Option("--price", help="Of one GPU for an hour.")] = None,
    pue: Annotated[float, typer.Option("--pue", help="The building's power over the nodes'.")] = 1.0,
    goodput: Annotated[float, typer.Option("--goodput", help="Share of the wall time that trains.")] = 1.0,
    *,
    said: Said,
    as_json: subject.AsJson = False,
) -> None:
    """Days, GPU-hours, energy and money of a token budget; a model without --layout gets its best one."""
    from superpod.planner import cost as costs
    from superpod.planner import explain, legality, plans, predict

    job = said.job()
    if said.layout is None and not said.is_recipe:
        job = plans.best(job)
    legality.require(job)
    prediction = predict.one(job)
    rate = prediction.tokens_per_s_per_gpu or 0.0
    found = costs.of(
        job.node, job.gpus, tokens=_tokens(tokens), tokens_per_s_per_gpu=rate, price=price, pue=pue, goodput=goodput
    )
    if as_json:
        print(json.dumps({"layout": vars(job.layout), "tokens_per_s_per_gpu": rate, **vars(found)}, indent=1))
        return
    print(
        f"{job.model.name}, {job.gpus:,} x {job.node.gpu.name}: {explain.title(job.layout)}, {rate:,.0f} tokens/s/GPU"
    )
    if prediction.verdict == "oom":
        print(f"it does not fit: {explain.short_of(job, prediction)}")
    print(f"{found.days:,.1f} days, {found.gpu_hours:,.0f} GPU-hours, {found.energy_mwh:,.0f} MWh at full power")
    if found.money is not None:
        print(f"{found.money:,.0f} at {price:g} per GPU-hour")
    if prediction.verdict == "oom":
        raise typer.Exit(2)


def _tokens(text: str) -> float:
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([MBT]?)", text.strip(), re.IGNORECASE)
    try:
        return float(match[1]) * UNITS[match[2].upper()]  # type: ignore[index]
    except (TypeError, ValueError, KeyError):
        raise UserError(f"--tokens is {text!r}; it is a number, such as 15T, 300B or 2e12") from None


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(re.fullmatch(r"[0-9]{1,9}", part) and int(part) for part in parts):
        raise UserError(f"--gpus is {text!r}; it is a list of sizes, such as 64,128,256")
    return sorted({int(part) for part in parts})
