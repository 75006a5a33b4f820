"""What a token budget takes: days, GPU-hours, energy, money."""

from __future__ import annotations

import math
from dataclasses import dataclass

from superpod.errors import UserError
from superpod.planner.hardware import Node

DAY_S, HOUR_S = 86_400, 3_600


@dataclass(frozen=True)
class Cost:
    """A whole training at the throughput given, without interruptions."""

    days: float
    gpu_hours: float
    energy_mwh: float
    """At the nodes' full power x PUE, as a budget must plan for it. The real draw is lower."""
    money: float | None
    """In the currency of the price."""


def training_cost(
    node: Node,
    gpus: int,
    *,
    tokens: float,
    tokens_per_s_per_gpu: float,
    price: float | None = None,
    pue: float = 1.0,
    goodput: float = 1.0,
) -> Cost:
    """The cost of training on `tokens` tokens.

    Args:
        node: its maximum power over its GPUs counts per GPU, W.
        gpus: number of GPUs.
        tokens: length of the training.
        tokens_per_s_per_gpu: throughput while it trains.
        price: price of one GPU for an hour.
        pue: power usage effectiveness, the building's power over the nodes', 1 or more.
        goodput: share of the wall time that makes progress, 0 to 1; restarts and repeated steps are the rest.

    Raises:
        UserError: when a number is out of its range.
    """
    positive = {"tokens": tokens, "tokens_per_s_per_gpu": tokens_per_s_per_gpu, "gpus": gpus}
    for key, value in positive.items():
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"{key} is {value}; it is more than 0")
    if not 0 < goodput <= 1:
        raise UserError(f"goodput is {goodput}; it is a share of the wall time, more than 0 and at most 1")
    if not (math.isfinite(pue) and pue >= 1):
        raise UserError(f"pue is {pue}; it is 1 or more")
    if price is not None and not (math.isfinite(price) and price >= 0):
        raise UserError(f"price is {price}; it is what one GPU costs in an hour, 0 or more")
    seconds = tokens / (tokens_per_s_per_gpu * gpus) / goodput
    hours = seconds * gpus / HOUR_S
    energy, money = hours * node.power_w_per_gpu * pue / 1e6, None if price is None else hours * price
    if not all(map(math.isfinite, (seconds, hours, energy, money or 0.0))):
        raise UserError(f"tokens {tokens:g}, price {price}, pue {pue:g} and goodput {goodput:g} give no finite cost")
    return Cost(days=seconds / DAY_S, gpu_hours=hours, energy_mwh=energy, money=money)
