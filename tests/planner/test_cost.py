import math

import pytest

from superpod.errors import UserError
from superpod.planner import cost, hardware

NODE = hardware.node("h100")
RUN = {"tokens": 1e12, "tokens_per_s_per_gpu": 10_000.0}


def test_a_trillion_tokens_by_hand():
    costs = cost.training_cost(NODE, 64, **RUN, price=2.0)
    seconds = 1e12 / (10_000 * 64)
    assert costs.days == pytest.approx(seconds / 86_400)
    assert costs.gpu_hours == pytest.approx(seconds * 64 / 3600)
    assert costs.money == pytest.approx(2 * costs.gpu_hours)
    assert costs.energy_mwh == pytest.approx(costs.gpu_hours * 10_200 / 8 / 1e6)  # DGX H100: 10.2 kW


def test_more_gpus_take_fewer_days_and_the_same_gpu_hours():
    one, two = cost.training_cost(NODE, 64, **RUN), cost.training_cost(NODE, 128, **RUN)
    assert two.days == pytest.approx(one.days / 2)
    assert two.gpu_hours == pytest.approx(one.gpu_hours)


def test_lost_time_costs_days_and_a_building_costs_energy():
    plain, lossy = cost.training_cost(NODE, 64, **RUN), cost.training_cost(NODE, 64, **RUN, goodput=0.5, pue=1.2)
    assert lossy.days == pytest.approx(2 * plain.days)
    assert lossy.energy_mwh == pytest.approx(2 * 1.2 * plain.energy_mwh)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens": 0}, "tokens must .*0"),
        ({"tokens": math.nan}, "tokens must .*nan"),
        ({"tokens_per_s_per_gpu": -1.0}, "tokens_per_s_per_gpu must .*-1.0"),
        ({"pue": 0.9}, "pue must .*0.9"),
        ({"goodput": 0.0}, "goodput must .*0.0"),
        ({"goodput": 1.5}, "goodput must .*1.5"),
        ({"price": math.inf}, "price .*must be .*inf"),
    ],
)
def test_numbers_out_of_range_are_refused(change, says):
    with pytest.raises(UserError, match=says):
        cost.training_cost(NODE, 64, **RUN | change)
