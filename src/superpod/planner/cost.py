"""Cost of a training by its number of tokens: days, GPU-hours, energy and money."""

from __future__ import annotations

import math
from dataclasses import dataclass

from superpod.errors import UserError
from superpod.planner.hardware import Node

DAY_S, HOUR_S = 86_400, 3_600


@dataclass(frozen=True)
class Cost:
    """Cost of a complete training."""

    days: float
    gpu_hours: float
    energy_mwh: float
    """At the nodes' maximum power x PUE; the actual consumption is lower."""
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
    """Return the cost of training on `tokens` tokens.

    Args:
        node: gives the maximum power per GPU, W.
        gpus: number of GPUs.
        tokens: length of the training.
        tokens_per_s_per_gpu: throughput while training.
        price: price per GPU and hour.
        pue: power usage effectiveness, 1 or more.
        goodput: fraction of the wall time that makes progress, 0 to 1; the rest is restarts and repeated steps.

    Raises:
        UserError: a number is out of range.
    """
    positive = {"tokens": tokens, "tokens_per_s_per_gpu": tokens_per_s_per_gpu, "gpus": gpus}
    for key, value in positive.items():
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"{key} must be finite and above 0, not {value}")
    if not 0 < goodput <= 1:
        raise UserError(f"goodput must be above 0 and at most 1, not {goodput}")
    if not (math.isfinite(pue) and pue >= 1):
        raise UserError(f"pue must be 1 or more, not {pue}")
    if price is not None and not (math.isfinite(price) and price >= 0):
        raise UserError(f"price must be 0 or more per GPU and hour, not {price}")
    seconds = tokens / (tokens_per_s_per_gpu * gpus) / goodput
    hours = seconds * gpus / HOUR_S
    energy, money = hours * node.power_w_per_gpu * pue / 1e6, None if price is None else hours * price
    if not all(map(math.isfinite, (seconds, hours, energy, money or 0.0))):
        raise UserError(f"tokens {tokens:g}, price {price}, pue {pue:g} and goodput {goodput:g} give no finite cost")
    return Cost(days=seconds / DAY_S, gpu_hours=hours, energy_mwh=energy, money=money)
