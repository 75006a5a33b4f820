"""Collectives: published volumes, two tiers, and that nothing gets faster with less."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from superpod.errors import UserError
from superpod.planner import hardware
from superpod.planner.timing import collectives
from superpod.planner.timing.collectives import Links, links, seconds, volumes

FAST = Links(near_bytes_per_s=400e9, far_bytes_per_s=50e9, near_s=5e-6, far_s=20e-6)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@pytest.mark.parametrize(
    ("operation", "share"),
    [("all_reduce", 2 * 7 / 8), ("all_gather", 7 / 8), ("reduce_scatter", 7 / 8), ("all_to_all", 7 / 8)],
)
def test_bytes_of_a_gpu_inside_one_domain(operation, share):
    v = volumes(operation, 800.0, 8, 8)
    assert v.near == pytest.approx(800 * share)
    assert v.far == 0


def test_ring_between_nodes_spreads_over_the_rails_of_a_node():
    v = volumes("all_gather", 1600.0, 16, 8)
    assert v.near == pytest.approx(1600 * 15 / 16)
    assert v.far == pytest.approx(1600 * 15 / 16 / 8)


def test_all_to_all_leaves_a_node_over_each_gpus_own_port():
    v = volumes("all_to_all", 1600.0, 16, 8)
    assert v.near == pytest.approx(1600 * 7 / 16)
    assert v.far == pytest.approx(1600 * 8 / 16)


def test_ring_all_reduce_of_175b_fp32_gradients_at_25_gb_per_s():
    # a published worked example: 700 GB over 25 GB/s takes 2 x 28 s, were every GPU alone on its port
    one = Links(near_bytes_per_s=1e12, far_bytes_per_s=25e9)
    assert seconds("all_reduce", 175e9 * 4, 1024, 1, one) == pytest.approx(56, rel=0.002)


@pytest.mark.parametrize("operation", [*KINDS, "send"])
def test_one_rank_alone_sends_nothing(operation):
    assert seconds(operation, 1e9, 1, 1, FAST) == 0


def test_send_takes_the_tier_that_joins_the_two():
    assert seconds("send", 4e9, 2, 2, FAST) == pytest.approx(0.01, rel=0.01)
    assert seconds("send", 4e9, 2, 1, FAST) == pytest.approx(0.08, rel=0.01)


def test_arrays_give_what_single_calls_give():
    ranks = np.array([2, 8, 16, 64])
    times = seconds("all_reduce", 1e8, ranks, np.minimum(ranks, 8), FAST)
    assert times == pytest.approx([seconds("all_reduce", 1e8, int(n), min(int(n), 8), FAST) for n in ranks])


def test_an_unknown_operation_names_the_known_ones():
    with pytest.raises(UserError, match="broadcats") as caught:
        volumes("broadcats", 1.0, 2, 2)  # type: ignore[arg-type]
    assert "all_gather" in str(caught.value.hint)


def test_links_are_the_nodes_own():
    h100 = hardware.node("h100")
    h100_links = links(h100, hardware.builtin().fabric_of(h100), near=0.8)
    assert h100_links.near_bytes_per_s == pytest.approx(0.8 * 450e9)
    assert h100_links.far_bytes_per_s == pytest.approx(50e9)


def test_cards_without_nvlink_share_pcie():
    l40s = hardware.node("l40s")
    assert links(l40s, hardware.builtin().fabric_of(l40s)).near_bytes_per_s == pytest.approx(16e9)
    assert collectives.inter_domain_gb_per_s(l40s.replace(nics=0), hardware.fabric("ib_hdr")) > 0


@given(
    operation=st.sampled_from(KINDS),
    size=st.floats(1, 1e12),
    exponent=st.integers(1, 12),
    domain=st.sampled_from((1, 4, 8, 64)),
    slower=st.floats(1, 100),
)
def test_time_never_falls_with_slower_links_or_more_bytes(operation, size, exponent, domain, slower):
    ranks, near = 2**exponent, min(domain, 2**exponent)
    start = seconds(operation, size, ranks, near, FAST)
    slow = Links(FAST.near_bytes_per_s / slower, FAST.far_bytes_per_s / slower, FAST.near_s * slower, FAST.far_s)
    assert seconds(operation, size, ranks, near, slow) >= start
    assert seconds(operation, size * slower, ranks, near, FAST) >= start
    assert start > 0
