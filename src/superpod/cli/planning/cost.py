"""`recipes cost`: days, energy and money of a whole training."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import tables
from superpod.cli.options import page_options
from superpod.cli.options.plan_options import PlanOptions, with_plan_options
from superpod.cli.options.request_options import AsJson
from superpod.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from superpod.planner.cost import Cost
    from superpod.planner.planned_job import PlannedJob
    from superpod.planner.predict import Prediction

UNITS = {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12}
MOST_TOKENS = 1e18
"""Far more than was ever written; a larger budget is a typing error."""
LONGEST_CURRENCY = 12
NUMBER = re.compile(r"-?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]{1,3})?", re.ASCII | re.IGNORECASE)


@with_plan_options("task", "option", "fabric")
def cost(
    tokens: Annotated[str, typer.Option("--tokens", help="Tokens of the training: 15T, 300B, 2e12.")],
    gpu: Annotated[str | None, typer.Option("--gpu", help="Such as h100; h100,h200,b200 are compared.")] = None,
    price: Annotated[
        str | None,
        typer.Option("--price", help="Price of a GPU-hour, of each GPU if they differ: 2.5 or h100=2,b200=4."),
    ] = None,
    currency: Annotated[str, typer.Option("--currency", help="Of the price; it is only printed.")] = "",
    pue: Annotated[float, typer.Option("--pue", help="Power of the building over that of the nodes.")] = 1.0,
    goodput: Annotated[float, typer.Option("--goodput", help="Share of the wall time that trains.")] = 1.0,
    *,
    options: PlanOptions,
    as_json: AsJson = False,
    html: page_options.Html = None,
) -> None:
    """Compute days, GPU-hours, energy and money of a token budget; a model without --layout gets its best one."""
    page_options.check(html)
    kinds = list(dict.fromkeys(part.strip() for part in gpu.split(",") if part.strip())) if gpu else [None]
    if len(currency) > LONGEST_CURRENCY or not currency.isprintable():
        raise UserError(f"--currency is {currency[:LONGEST_CURRENCY]!r}", "a short word, such as EUR")
    prices, budget = _prices(price, kinds or [None], options), _tokens(tokens)
    of = [
        _budget(replace(options, gpu=kind), budget, price=prices.get(kind), pue=pue, goodput=goodput) for kind in kinds
    ]
    order = sorted(of, key=lambda one: (not one.fits, one.total.money is None, one.total.money or one.total.gpu_hours))
    assumptions = _assumptions(order[0].job, budget, pue, goodput, currency if price else None)
    if html is not None:
        _page(html, order, assumptions, currency)
    if as_json:
        facts = [one.as_json() for one in order]
        print(json.dumps(facts if len(facts) > 1 else facts[0], indent=1))
    else:
        _show(order, currency)
        tables.say(f"- {assumptions}")
    if not any(one.fits for one in order):
        raise typer.Exit(2)


@dataclass(frozen=True)
class Budget:
    """What the tokens take on one kind of GPU."""

    job: PlannedJob
    prediction: Prediction
    total: Cost
    price: float | None

    @property
    def fits(self) -> bool:
        """Whether the GPUs have the memory; a tight run counts, and is called so."""
        return self.prediction.fit != "does not fit"

    def as_json(self) -> dict[str, object]:
        """As `--json` prints it."""
        rate = self.prediction.tokens_per_s_per_gpu
        known = {"gpu": self.job.node.gpu.name, "precision": self.job.precision, "fits": self.fits}
        return known | {"layout": vars(self.job.layout), "tokens_per_s_per_gpu": rate, **vars(self.total)}


def _budget(options: PlanOptions, tokens: float, *, price: float | None, pue: float, goodput: float) -> Budget:
    from superpod.planner import cost as costs
    from superpod.planner import legality, plans, predict

    auto = options.precision == "auto"
    job = options.job(precision=None if auto else options.precision)
    if options.layout is None and not options.is_recipe:
        job = plans.best(job, auto=auto)
    elif auto:
        raise UserError("--precision auto plans a model; a recipe and a --layout have theirs")
    legality.require(job)
    prediction = predict.one(job)
    rate = prediction.tokens_per_s_per_gpu or 0.0
    total = costs.of(
        job.node, job.gpus, tokens=tokens, tokens_per_s_per_gpu=rate, price=price, pue=pue, goodput=goodput
    )
    return Budget(job, prediction, total, price)


def _show(budgets: list[Budget], currency: str) -> None:
    from superpod.planner import explain

    titles, rows = _table(budgets, currency)
    tables.show_folded(titles, rows, fold=len(titles) - 1)
    for one in budgets:
        if one.prediction.fit != "fits":
            outcome = "is tight" if one.prediction.tight else "does not fit"
            tables.say(f"- {one.job.node.gpu.name} {outcome}: {explain.short_of(one.job, one.prediction)}")


def _table(budgets: list[Budget], currency: str) -> tuple[list[str], list[list[str]]]:
    """Titles and rows."""
    from superpod.planner import explain

    priced = [f"cost {currency}".strip()] * any(one.total.money is not None for one in budgets)
    titles = ["GPUs", "tokens/s/GPU", "days", "GPU-hours", "MWh", *priced, "layout"]
    rows = []
    for one in budgets:
        total, job = one.total, one.job
        figures = [f"{one.prediction.tokens_per_s_per_gpu:,.0f}", f"{total.days:,.1f}", f"{total.gpu_hours:,.0f}"]
        figures += [f"{total.energy_mwh:,.0f}", *["-" if total.money is None else f"{total.money:,.0f}"] * len(priced)]
        rows.append([_name(job), *figures, explain.title(job.layout)])
    return titles, rows


def _name(job: PlannedJob) -> str:
    return f"{job.gpus:,} x {job.node.gpu.name} {job.precision}"


def _page(path: Path, budgets: list[Budget], assumptions: str, currency: str) -> None:
    from superpod.pages import sizes_page
    from superpod.planner import explain

    titles, rows = _table(budgets, currency)
    facts = [
        {"name": _name(one.job), "title": explain.title(one.job.layout), "fits": one.fits, **vars(one.total)}
        | {"rate": one.prediction.tokens_per_s_per_gpu}
        for one in budgets
    ]
    text = sizes_page.of_cost(
        budgets[0].job.model.name, facts, titles=titles, rows=rows, assumptions=assumptions, currency=currency,
        command=page_options.command(),
    )  # fmt: skip
    page_options.write_page(path, text)


def _assumptions(job: PlannedJob, tokens: float, pue: float, goodput: float, currency: str | None) -> str:
    """What the figures take for granted, so that nobody has to guess."""
    money = "" if currency is None else f"; money is {currency or 'in the currency of --price'}, GPU-hours only"
    return (
        f"{job.model.name}, {tables.amount(tokens)} tokens at seq {job.seq:,} and gbs {job.layout.gbs:,}; "
        f"{goodput:.0%} of the time trains (--goodput); energy at the nodes' full power x {pue:g} (--pue)" + money
    )


def _prices(text: str | None, kinds: Sequence[str | None], options: PlanOptions) -> dict[str | None, float]:
    """`2.5` for every kind of GPU, or `h100=2,b200=4`; a recipe's own GPU, without --gpu, has a name too."""
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    own = options.job().node.gpu.name if kinds == [None] and any("=" in part for part in parts) else None
    called = {(kind or own or "").lower(): kind for kind in kinds}
    prices: dict[str | None, float] = {}
    for part in parts:
        name, equals, number = (piece.strip() for piece in part.rpartition("="))
        if not NUMBER.fullmatch(number):
            raise UserError(f"--price is {text!r}", "a number, or one for each GPU: h100=2,b200=4")
        if equals and name.lower() not in called:
            ours = f"this is planned on {own}" if own else "--gpu does not"
            raise UserError(f"--price names {name!r}, and {ours}", did_you_mean(name, [*called]))
        priced = [called[name.lower()]] if equals else [*kinds]
        if prices.keys() & priced:
            raise UserError(f"--price {text!r} prices one GPU twice", "give each GPU one price: h100=2,b200=4")
        prices |= dict.fromkeys(priced, float(number))
    return prices


def _tokens(text: str) -> float:
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([MBT]?)", text.strip(), re.IGNORECASE)
    try:
        count = float(match[1]) * UNITS[match[2].upper()]  # type: ignore[index]
    except (TypeError, ValueError, KeyError):
        raise UserError(f"--tokens is {text!r}; it is a number, such as 15T, 300B or 2e12") from None
    if count > MOST_TOKENS:
        raise UserError(f"--tokens is {text!r}; it is at most {MOST_TOKENS:g}", "such as 15T, 300B or 2e12")
    return count
