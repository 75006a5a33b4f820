"""Cost of a training run for a number of tokens: days, GPU-hours, energy and money."""

from __future__ import annotations

import math
from dataclasses import dataclass

from superpod.errors import UserError
from superpod.planner.hardware import Node


@dataclass(frozen=True)
class Cost:
    """Time, energy and money that a training run needs."""

    days: float
    gpu_hours: float
    energy_mwh: float
    """Based on the nodes' maximum power x PUE; the actual consumption is lower."""
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
        node: node type, whose maximum power per GPU is used.
        gpus: number of GPUs.
        tokens: number of training tokens.
        tokens_per_s_per_gpu: throughput of the training steps.
        price: price per GPU-hour.
        pue: power usage effectiveness, at least 1.
        goodput: fraction of the wall-clock time spent in productive steps, 0 to 1.

    Raises:
        UserError: a number is out of range.
    """
    positive_values = {"tokens": tokens, "tokens_per_s_per_gpu": tokens_per_s_per_gpu, "gpus": gpus}
    for key, value in positive_values.items():
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"{key} must be finite and greater than 0, not {value}")
    if not 0 < goodput <= 1:
        raise UserError(f"goodput must be greater than 0 and at most 1, not {goodput}")
    if not (math.isfinite(pue) and pue >= 1):
        raise UserError(f"pue must be at least 1, not {pue}")
    if price is not None and not (math.isfinite(price) and price >= 0):
        raise UserError(f"the price per GPU-hour must be at least 0, not {price}")
    seconds = tokens / (tokens_per_s_per_gpu * gpus) / goodput
    hours = seconds * gpus / 3600
    energy = hours * node.power_w_per_gpu * pue / 1e6
    money = None if price is None else hours * price
    if not all(map(math.isfinite, (seconds, hours, energy, money or 0.0))):
        raise UserError(
            f"the cost for tokens {tokens:g}, price {price}, pue {pue:g}, goodput {goodput:g} is not finite"
        )
    return Cost(days=seconds / 86_400, gpu_hours=hours, energy_mwh=energy, money=money)
