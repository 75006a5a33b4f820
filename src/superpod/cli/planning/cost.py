"""`recipes cost`: estimate the duration, energy and cost of a training run."""

from __future__ import annotations

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
MAX_TOKENS = 1e18
"""Maximum token budget. It exceeds all existing text, so a larger value is a typing error."""
MAX_CURRENCY_LENGTH = 12
NUMBER = re.compile(r"-?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]{1,3})?", re.ASCII | re.IGNORECASE)


@with_plan_options("task", "option", "fabric")
def cost(
    tokens: Annotated[str, typer.Option("--tokens", help="Number of training tokens, such as 15T, 300B or 2e12.")],
    gpu: Annotated[str | None, typer.Option("--gpu", help="GPU type, or several to compare: h100,h200,b200.")] = None,
    price: Annotated[
        str | None, typer.Option("--price", help="Price per GPU-hour, such as 2.5, or per GPU type: h100=2,b200=4.")
    ] = None,
    currency: Annotated[str, typer.Option("--currency", help="Currency of --price, such as EUR; a label only.")] = "",
    pue: Annotated[
        float,
        typer.Option("--pue", help="Power usage effectiveness: power of the data center divided by that of the nodes."),
    ] = 1.0,
    goodput: Annotated[float, typer.Option("--goodput", help="Fraction of wall-clock time in productive steps.")] = 1.0,
    *,
    options: PlanOptions,
    as_json: AsJson = False,
    html: page_options.Html = None,
) -> None:
    """Estimate the days, GPU-hours, energy and cost of training on a number of tokens.

    The layout is that of the recipe or of --layout; for a model without --layout, the best one is used.
    """
    page_options.check(html)
    gpu_types: list[str | None] = [None]
    if gpu:
        gpu_types = list(dict.fromkeys(part.strip() for part in gpu.split(",") if part.strip()))
    if len(currency) > MAX_CURRENCY_LENGTH or not currency.isprintable():
        printed_currency = currency[:MAX_CURRENCY_LENGTH]
        raise UserError(
            f"--currency must have at most {MAX_CURRENCY_LENGTH} printable characters: {printed_currency!r}",
            "for example EUR",
        )
    prices, token_count = _parse_prices(price, gpu_types or [None], options), _parse_tokens(tokens)
    estimates = [
        _estimate(replace(options, gpu=kind), token_count, price=prices.get(kind), pue=pue, goodput=goodput)
        for kind in gpu_types
    ]
    estimates.sort(key=lambda e: (not e.fits, e.total.money is None, e.total.money or e.total.gpu_hours))
    assumptions = _assumptions(estimates[0].job, token_count, pue, goodput, currency if price else None)
    if html is not None:
        _write_page(html, estimates, assumptions, currency)
    if as_json:
        facts = [estimate.as_json() for estimate in estimates]
        tables.print_json(facts if len(facts) > 1 else facts[0])
    else:
        _print_table(estimates, currency)
        tables.print_wrapped(f"- {assumptions}")
    if not any(estimate.fits for estimate in estimates):
        raise typer.Exit(2)


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of training on the given number of tokens with one GPU type."""

    job: PlannedJob
    prediction: Prediction
    total: Cost

    @property
    def fits(self) -> bool:
        """Whether the run fits in memory; True also if it is tight."""
        return self.prediction.fit != "does not fit"

    @property
    def days_interval(self) -> tuple[float, float]:
        """Lower and upper bound of the days, from the 80 % interval of the predicted step time."""
        p = self.prediction
        days_per_second = self.total.days / (p.step_time_s or 1.0)
        return days_per_second * (p.step_time_low_s or 0.0), days_per_second * (p.step_time_high_s or 0.0)

    def as_json(self) -> dict[str, object]:
        """Return the object that `--json` prints."""
        return {
            "gpu": self.job.node.gpu.name,
            "precision": self.job.precision,
            "fits": self.fits,
            "layout": vars(self.job.layout),
            "tokens_per_s_per_gpu": self.prediction.tokens_per_s_per_gpu,
            **vars(self.total),
            "days_low": self.days_interval[0],
            "days_high": self.days_interval[1],
            "extrapolation": self.prediction.extrapolation,
        }


def _estimate(options: PlanOptions, tokens: float, *, price: float | None, pue: float, goodput: float) -> Estimate:
    """Return the estimate for one GPU type. Raises UserError if the layout is illegal or none fits."""
    from superpod.planner import cost as costs
    from superpod.planner import legality, plans, predict

    is_auto = options.precision == "auto"
    job = options.job(precision=None if is_auto else options.precision)
    if options.layout is None and not options.is_recipe:
        job = plans.best(job, auto=is_auto)
    elif is_auto:
        raise UserError(
            "--precision auto requires a model without --layout; recipes and layouts have a fixed precision",
            "select one precision, such as --precision bf16",
        )
    legality.require(job)
    prediction = predict.one(job)
    rate = prediction.tokens_per_s_per_gpu or 0.0
    total = costs.training_cost(
        job.node, job.gpus, tokens=tokens, tokens_per_s_per_gpu=rate, price=price, pue=pue, goodput=goodput
    )
    return Estimate(job, prediction, total)


def _print_table(estimates: list[Estimate], currency: str) -> None:
    from superpod.planner import suggestions

    titles, rows = _table(estimates, currency)
    tables.print_folded_table(titles, rows, fold=len(titles) - 1)
    for line in dict.fromkeys(one.prediction.extrapolation for one in estimates if one.prediction.extrapolation):
        tables.print_wrapped(f"- {line}")
    for one in estimates:
        if one.prediction.fit != "fits":
            outcome = "is tight" if one.prediction.tight else "does not fit"
            tables.print_wrapped(
                f"- {one.job.node.gpu.name} {outcome}: {suggestions.describe_shortage(one.job, one.prediction)}"
            )


def _table(estimates: list[Estimate], currency: str) -> tuple[list[str], list[list[str]]]:
    """Return the column titles and one row of cells per GPU type."""
    from superpod.planner import explain, intervals

    has_prices = any(one.total.money is not None for one in estimates)
    titles = ["GPUs", "tokens/s/GPU", "days", "GPU-hours", "MWh"]
    if has_prices:
        titles.append(f"cost {currency}".strip())
    rows = []
    for one in estimates:
        total = one.total
        row = [
            _job_name(one.job),
            f"{one.prediction.tokens_per_s_per_gpu:,.0f}",
            intervals.text(total.days, *one.days_interval, unit=""),
            f"{total.gpu_hours:,.0f}",
            f"{total.energy_mwh:,.0f}",
        ]
        if has_prices:
            row.append("-" if total.money is None else f"{total.money:,.0f}")
        rows.append([*row, explain.title(one.job.layout)])
    return [*titles, "layout"], rows


def _job_name(job: PlannedJob) -> str:
    return f"{job.gpus:,} x {job.node.gpu.name} {job.precision}"


def _write_page(path: Path, estimates: list[Estimate], assumptions: str, currency: str) -> None:
    from superpod.pages import sizes_page
    from superpod.planner import explain

    titles, rows = _table(estimates, currency)
    facts = [
        {
            "name": _job_name(one.job),
            "title": explain.title(one.job.layout),
            "fits": one.fits,
            **vars(one.total),
            "rate": one.prediction.tokens_per_s_per_gpu,
        }
        for one in estimates
    ]
    text = sizes_page.render_cost(
        estimates[0].job.model.name, facts, titles=titles, rows=rows, assumptions=assumptions, currency=currency,
        command=page_options.command(),
    )  # fmt: skip
    page_options.write_page(path, text)


def _assumptions(job: PlannedJob, tokens: float, pue: float, goodput: float, currency: str | None) -> str:
    """Describe the assumptions of the estimate in one line. `currency` is None without --price, "" if not named."""
    text = (
        f"{job.model.name}, {tables.format_count(tokens)} tokens at seq {job.seq:,} and gbs {job.layout.gbs:,}; "
        f"{goodput:.0%} of the wall-clock time is productive (--goodput); energy at full node power x {pue:g} (--pue)"
    )
    if currency is not None:
        text += f"; cost {f'in {currency}' if currency else 'in the currency of --price'} for GPU-hours only"
    return text


def _parse_prices(text: str | None, gpu_types: Sequence[str | None], options: PlanOptions) -> dict[str | None, float]:
    """Return the price per GPU-hour of each GPU type, from `2.5` (for all types) or `h100=2,b200=4`.

    Without --gpu, the only GPU type is None, and a price may name the GPU type of the recipe.

    Raises:
        UserError: a price is not a number, or names a GPU type that is not estimated or has two prices.
    """
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    recipe_gpu = None
    if gpu_types == [None] and any("=" in part for part in parts):
        recipe_gpu = options.job().node.gpu.name
    kinds_by_name = {(kind or recipe_gpu or "").lower(): kind for kind in gpu_types}
    prices: dict[str | None, float] = {}
    for part in parts:
        name, equals, number = (piece.strip() for piece in part.rpartition("="))
        if not NUMBER.fullmatch(number):
            raise UserError(
                f"--price must be a number or one number per GPU type, not {text!r}",
                "for example 2.5 or h100=2,b200=4",
            )
        if equals and name.lower() not in kinds_by_name:
            reason = f"the plan uses {recipe_gpu}" if recipe_gpu else "--gpu does not contain it"
            raise UserError(f"--price names {name!r}, but {reason}", did_you_mean(name, [*kinds_by_name]))
        priced_types = [kinds_by_name[name.lower()]] if equals else [*gpu_types]
        if prices.keys() & priced_types:
            raise UserError(f"--price {text!r} sets two prices for one GPU type", "set one per GPU type: h100=2,b200=4")
        prices |= dict.fromkeys(priced_types, float(number))
    return prices


def _parse_tokens(text: str) -> float:
    """Return the number of tokens in a text such as 15T, 300B or 2e12. Raises UserError if it is not a number."""
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([MBT]?)", text.strip(), re.IGNORECASE)
    try:
        count = float(match[1]) * UNITS[match[2].upper()]  # type: ignore[index]
    except (TypeError, ValueError, KeyError):
        raise UserError(f"--tokens must be a number, not {text!r}", "for example 15T, 300B or 2e12") from None
    if count > MAX_TOKENS:
        raise UserError(f"--tokens must be at most {MAX_TOKENS:g}, not {text!r}", "for example 15T, 300B or 2e12")
    return count
