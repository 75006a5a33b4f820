from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superpod.errors import UserError
from superpod.planner.layout import CHOICES, MAX_SIZE, Layout

DEGREES = st.sampled_from([1, 2, 3, 4, 5, 8])
LAYOUTS = st.builds(
    Layout,
    tp=DEGREES,
    pp=DEGREES,
    vp=st.none() | DEGREES,
    cp=DEGREES,
    ep=DEGREES,
    etp=st.none() | DEGREES,
    sp=st.booleans(),
    mbs=DEGREES,
    gbs=st.integers(1, 512),
)


@given(layout=LAYOUTS, dp=DEGREES, steps=st.integers(1, 4), rest=st.sampled_from([0, 0, 0, 1]))
def test_a_legal_layout_divides_up_the_world_and_the_batch_without_rest(layout, dp, steps, rest):
    """Whatever is legal divides; and what divides, with a rest of 0, is legal."""
    pp, experts = layout.pp, layout.tp * layout.cp * dp
    ep = max(d for d in range(1, layout.ep + 1) if experts % d == 0)
    layout = layout.replace(
        sp=layout.sp and layout.tp > 1,
        vp=layout.vp if layout.vp != 1 and pp > 1 else None,
        ep=ep,
        etp=1,
        gbs=layout.mbs * dp * pp * steps + rest,
    )
    world = layout.model_parallel * dp
    broken = layout.violations(world)
    divides = layout.gbs % (layout.mbs * dp) == 0 and (layout.vp is None or layout.gbs // (layout.mbs * dp) % pp == 0)
    assert (not broken) == divides, broken
    if broken:
        assert rest
        return
    assert layout.dp(world) == dp
    assert layout.tp * layout.pp * layout.cp * dp == world
    assert layout.mbs * dp * layout.micro_batches(world) == layout.gbs
    experts = layout.ep * (layout.etp or layout.tp)
    assert world // layout.pp % experts == 0


@pytest.mark.parametrize(("tp", "pp", "cp"), list(product([1, 2, 3], repeat=3)))
def test_every_multiple_of_the_model_parallel_size_is_legal(tp, pp, cp):
    layout = Layout(tp=tp, pp=pp, cp=cp, gbs=8)
    assert [dp for dp in (1, 2, 4, 8) if layout.violations(layout.model_parallel * dp)] == []


@pytest.mark.parametrize(
    ("layout", "world", "rule", "move"),
    [
        (
            Layout(tp=8, pp=4, cp=2),
            48,
            "tp 8 x pp 4 x cp 2 = 64 must divide the number of GPUs, which is 48",
            "64 GPUs",
        ),
        (Layout(tp=0), 4, "tp must be at least 1, not 0", ""),
        (Layout(gbs=-4), 4, "gbs must be at least 1, not -4", ""),
        (Layout(tp=2), 3, "tp 2 x pp 1 x cp 1 = 2 must divide", "2 or 4 GPUs"),
        (Layout(sp=True), 1, "requires tensor parallelism, but tp is 1", "disable sp"),
        (Layout(vp=2), 1, "vp 2 requires pipeline parallelism, but pp is 1", "remove vp"),
        (Layout(mbs=2, gbs=10), 4, "gbs 10 must be a multiple of mbs 2 x dp 4 = 8", "gbs 8 or 16"),
        (Layout(pp=4, vp=2, gbs=6), 4, "(6 / (1 x 1) = 6) must be a multiple of pp 4", "set gbs 4"),
        (Layout(ep=8, gbs=4), 4, "ep 8 x etp 1 = 8 must divide tp x cp x dp = 4", "divisor of 4"),
    ],
)
def test_a_broken_rule_is_named_with_its_numbers_and_the_next_move(layout, world, rule, move):
    (violation,) = layout.violations(world)
    assert rule in violation[0]
    assert move in violation[1]


def test_dp_of_a_world_that_does_not_divide_is_the_users_mistake():
    with pytest.raises(UserError, match="= 4 must divide"):
        Layout(tp=4).dp(6)


HOSTILE = st.integers() | st.booleans() | st.text(max_size=3) | st.sampled_from(["full", "zero1"]) | st.none()


@given(st.dictionaries(st.sampled_from(sorted(vars(Layout()))) | st.text(max_size=6), HOSTILE, max_size=5))
def test_hostile_tables_make_a_layout_or_one_clear_error(values):
    if all(name in vars(Layout()) and _fits(name, value) for name, value in values.items()):
        assert vars(Layout.from_mapping(values, "here")).items() >= values.items()
    else:
        with pytest.raises(UserError, match=r"^here: "):
            Layout.from_mapping(values, "here")


def _fits(name, value):
    if name in CHOICES:
        return value in CHOICES[name]
    default = getattr(Layout(), name)
    if type(value) is int and abs(value) > MAX_SIZE:
        return False
    return (
        type(default) is not tuple and name != "chunks" and type(value) is (int if default is None else type(default))
    )


@pytest.mark.parametrize(
    ("layout", "text"),
    [(Layout(), "DP only"), (Layout(tp=8, pp=8, vp=8, cp=2, sp=True), "TP8 PP8 VP8 CP2 SP"), (Layout(ep=4), "EP4")],
)
def test_short(layout, text):
    assert layout.short() == text
