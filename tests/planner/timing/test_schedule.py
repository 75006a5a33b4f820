"""The pipeline: published bubbles, the timeline's own laws, and the closed form beside it."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superpod.errors import UserError
from superpod.planner.timing.schedule import closed_form, order, span, timeline


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8, 32])
def test_equal_stages_closed_form_is_exact(name, pp, micro_batches):
    events = timeline([1.0] * pp, [2.0] * pp, micro_batches, name=name)
    assert span(events) == pytest.approx(closed_form([1.0] * pp, [2.0] * pp, micro_batches), rel=1e-12)
    assert span(events) == pytest.approx((micro_batches + pp - 1) * 3)


@pytest.mark.parametrize("vp", [2, 3, 5])
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 8), (8, 32)])
def test_interleaved_closed_form_is_exact_for_equal_stages(vp, pp, micro_batches):
    events = timeline([1.0] * pp, [2.0] * pp, micro_batches, vp=vp)
    assert span(events) == pytest.approx(closed_form([1.0] * pp, [2.0] * pp, micro_batches, vp=vp), rel=1e-12)
    assert span(events) == pytest.approx((micro_batches + (pp - 1) / vp) * 3)


@pytest.mark.parametrize(
    ("micro_batches", "vp", "share"),
    [(4, 1, 3 / 7), (8, 1, 3 / 11), (16, 1, 3 / 19), (32, 1, 3 / 35), (8, 2, 3 / 19), (8, 4, 3 / 35)],
)
def test_bubble_table_for_four_stages(micro_batches, vp, share):
    """(p - 1) / (v m + p - 1) of the whole step; (p - 1) / (v m) of the ideal one."""
    whole = span(timeline([1.0] * 4, [2.0] * 4, micro_batches, vp=vp))
    assert 1 - 3 * micro_batches / whole == pytest.approx(share)
    assert whole / (3 * micro_batches) - 1 == pytest.approx(3 / (vp * micro_batches))


def test_published_efficiency_of_32_micro_batches_over_16_stages():
    assert 32 * 3 / closed_form([1.0] * 16, [2.0] * 16, 32) == pytest.approx(32 / (32 + 15))


@settings(max_examples=60, deadline=None)
@given(
    pp=st.sampled_from((2, 4, 8)),
    vp=st.sampled_from((1, 2, 4)),
    groups=st.integers(1, 6),
    odd=st.lists(st.floats(0.85, 1.15), min_size=8, max_size=8),
)
def test_unequal_stages_closed_form_is_near_and_never_short(pp, vp, groups, odd):
    forward = odd[:pp]
    backward = [2 * t for t in forward]
    real = span(timeline(forward, backward, groups * pp, vp=vp))
    guess = closed_form(forward, backward, groups * pp, vp=vp)
    fill = 0.3 / groups  # what it overstates is filling and draining, which more micro-batches dilute
    assert real * (1 - 1e-9) <= guess <= real * (1 + fill)


@settings(max_examples=40, deadline=None)
@given(pp=st.sampled_from((1, 2, 4)), vp=st.sampled_from((1, 3)), groups=st.integers(1, 4), send=st.floats(0, 0.5))
def test_every_pass_runs_once_after_its_input_and_alone_on_its_stage(pp, vp, groups, send):
    vp = vp if pp > 1 else 1
    events = timeline([1.0] * pp, [2.0] * pp, groups * pp, vp=vp, send=send)
    end = {(e.stage, e.kind, e.chunk, e.micro_batch): e.end for e in events}
    assert len(end) == len(events) == 2 * pp * vp * groups * pp
    for e in events:
        position = e.chunk * pp + e.stage
        if e.kind == "forward" and position:
            before = (position - 1) % pp, "forward", (position - 1) // pp, e.micro_batch
            assert e.start >= end[before] + send - 1e-9
        if e.kind == "backward":
            assert e.start >= end[e.stage, "forward", e.chunk, e.micro_batch] - 1e-9
    for stage in range(pp):
        mine = sorted((e.start, e.end) for e in events if e.stage == stage)
        assert all(one[1] <= two[0] + 1e-9 for one, two in pairwise(mine))


def test_1f1b_keeps_fewer_micro_batches_in_flight_than_gpipe():
    assert max(_in_flight(order(0, 4, 1, 16))) == 4
    assert max(_in_flight(order(0, 4, 1, 16, "gpipe"))) == 16
    assert max(_in_flight(order(0, 4, 2, 16))) == 2 * 3 + 4 + 1  # formulas.md: 2(p - r - 1) + (v - 1) group + 1


def _in_flight(passes):
    held = 0
    for kind, *_ in passes:
        held += 1 if kind == "forward" else -1
        yield held


def test_messages_and_a_slow_stage_only_delay():
    plain = span(timeline([1.0] * 4, [2.0] * 4, 8))
    assert span(timeline([1.0] * 4, [2.0] * 4, 8, send=0.1)) > plain
    assert span(timeline([1.0, 1.0, 1.5, 1.0], [2.0] * 4, 8)) > plain


def test_interleaving_refuses_a_rest_of_micro_batches():
    with pytest.raises(UserError, match="the number of micro-batches, 7, must be a multiple of pp 4"):
        timeline([1.0] * 4, [2.0] * 4, 7, vp=2)
