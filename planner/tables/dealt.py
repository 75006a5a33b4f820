"""Pipeline stages as frameworks beside Megatron deal them."""

from __future__ import annotations


def by_cost(layers: int, pp: int, head: float) -> tuple[int, ...]:
    """Layers of each stage where a stage is full once its share of all parameters is passed, the output layer's too.

    `head` is what the output layer costs, in layers. So nanotron deals them (src/nanotron/models/base.py); the last
    stages may be left with no layer.
    """
    dealt, stage = [0] * pp, 0
    for layer in range(1, layers + 1):
        dealt[stage] += 1
        stage += layer > (layers + head) * (stage + 1) / pp
    return tuple(dealt)
