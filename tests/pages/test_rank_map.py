"""The rank map has Megatron-Core's process groups."""

import random

import pytest

from superpod.pages import rank_map
from superpod.pages.rank_map import DENSE, EXPERTS
from tests.pages.planning import job

POWERS = (1, 2, 4, 8)


def drawn_sizes(count):
    rng = random.Random(17)
    while count:
        x = {key: rng.choice(POWERS) for key in ("tp", "cp", "dp", "ep", "etp")} | {"pp": rng.choice((1, 2, 3, 4))}
        grid = x["tp"] * x["cp"] * x["dp"]
        if grid % (x["ep"] * x["etp"]) or grid * x["pp"] > 512:
            continue
        count -= 1
        yield x | {"edp": grid // (x["ep"] * x["etp"])}


def same(ours, theirs):
    return sorted(ours) == sorted(sorted(group) for group in theirs)


@pytest.mark.nemo
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what Megatron imports
def test_random_layouts_have_megatrons_groups():
    from megatron.core.parallel_state import RankGenerator

    order, seen = "tp-cp-ep-dp-pp", set()
    for x in drawn_sizes(200):
        seen.add(tuple(x.values()))
        grid = rank_map.make_grid(x, DENSE) | rank_map.make_grid(x, EXPERTS)
        dense = RankGenerator(tp=x["tp"], ep=1, dp=x["dp"], pp=x["pp"], cp=x["cp"], order=order)
        experts = RankGenerator(tp=x["etp"], ep=x["ep"], dp=x["edp"], pp=x["pp"], cp=1, order=order)
        for over in (("tp",), ("cp",), ("dp",), ("pp",), ("dp", "cp"), ("tp", "pp"), ("tp", "cp"), ("tp", "dp", "cp")):
            assert same(rank_map.groups(grid, DENSE, over), dense.get_ranks("-".join(over))), (x, over)
        for over in (("etp",), ("ep",), ("edp",), ("etp", "ep"), ("etp", "ep", "pp")):
            theirs = experts.get_ranks("-".join(over).replace("etp", "tp").replace("edp", "dp"))
            assert same(rank_map.groups(grid, EXPERTS, over), theirs), (x, over)
    assert len(seen) > 150


def test_an_example_of_16_gpus():
    """tp 2, pp 2, dp 4, ep 4 and etp 1, like the table in Megatron's documentation of parallel_state."""
    grid = rank_map.rank_grid(job("mixtral_8x7b", gpus=16, gbs=64, tp=2, pp=2, ep=4, etp=1, sp=True))
    assert rank_map.groups(grid, DENSE, ("tp",))[:3] == [[0, 1], [2, 3], [4, 5]]
    assert rank_map.groups(grid, DENSE, ("dp",))[:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert rank_map.groups(grid, DENSE, ("pp",))[0] == [0, 8]
    assert rank_map.groups(grid, EXPERTS, ("ep",))[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rank_map.groups(grid, EXPERTS, ("edp",))[0] == [0, 4]
    assert [int(grid["ep"].coordinate(rank)) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_dense_model_has_no_expert_grid():
    assert set(rank_map.rank_grid(job(tp=2, pp=2, sp=True))) == set(DENSE)
