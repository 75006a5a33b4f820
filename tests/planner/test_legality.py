import contextlib
import random
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from superpod.errors import UserError
from superpod.planner import hardware, models
from superpod.planner.layout import CHOICES, MODULES, Layout
from superpod.planner.legality import FIELDS, legal_mask, require, violations, warnings
from superpod.planner.models import ModelShape
from superpod.planner.planned_job import Options, PlannedJob

H100 = hardware.node("h100")
DENSE = models.find("llama3_8b")
SMALL = [
    ModelShape.from_shape(name="dense", layers=8, hidden=64, heads=8, kv_heads=4, ffn=96, vocab=100),
    ModelShape.from_shape(
        name="moe", layers=6, hidden=64, heads=8, vocab=96, experts=8, topk=2, expert_ffn=48, mtp_layers=1
    ),
    ModelShape.from_shape(
        name="mla", layers=6, hidden=64, heads=4, ffn=96, vocab=64, kv_lora=32, qk_nope_dim=16, v_dim=16, bias=True
    ),
    ModelShape.from_shape(
        name="hybrid",
        layers=4,
        hidden=64,
        heads=8,
        ffn=96,
        vocab=64,
        pattern="M-*-",
        mamba_heads=8,
        mamba_head_dim=8,
        mamba_state=8,
        mamba_groups=2,
    ),
]


def job(model=DENSE, gpus=8, seq=8192, precision="bf16", options=None, **layout):
    fabric = hardware.builtin().fabric_of(H100)
    return PlannedJob(model, H100, fabric, gpus, seq, precision, Layout(**layout), options=Options(**(options or {})))


DEGREE = st.sampled_from([1, 1, 2, 3, 4, 8])
JOBS = st.builds(
    lambda model, gpus, seq, precision, options, layout: job(model, gpus, seq, precision, options, **layout),
    model=st.sampled_from(SMALL),
    gpus=st.sampled_from([1, 2, 4, 6, 8, 16, 24, 64]),
    seq=st.sampled_from([16, 24, 30, 32]),
    precision=st.sampled_from(["bf16", "fp8ds", "mxfp8"]),
    options=st.fixed_dictionaries(
        {},
        optional={
            "overlap_p2p": st.booleans(),
            "overlap_grads": st.booleans(),
            "cuda_graphs": st.booleans(),
            "attention": st.sampled_from(["flash", "local"]),
            "moments": st.sampled_from(["fp32", "bf16"]),
            "fp8_params": st.booleans(),
            "framework": st.sampled_from(["megatron", "fsdp2"]),
        },
    ),
    layout=st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(("tp", "pp", "cp", "ep", "etp", "mbs", "recompute_layers"), DEGREE),
            "vp": st.sampled_from([None, 2, 3, 4]),
            "gbs": st.sampled_from([1, 4, 8, 24, 64]),
            **dict.fromkeys(("sp", "embedding_as_layer", "loss_as_layer"), st.booleans()),
            **{key: st.sampled_from(values) for key, values in CHOICES.items()},
            "recompute_modules": st.lists(st.sampled_from(MODULES), min_size=1, max_size=3, unique=True).map(tuple),
        },
    ),
)


def columns_of(jobs):
    """The layouts of several jobs as columns."""
    numpy = pytest.importorskip("numpy")
    facts = [{**vars(j.layout.rule_inputs(j.gpus)), **{k: getattr(j.layout, k) for k in FIELDS[-2:]}} for j in jobs]
    return {name: numpy.array([values[name] for values in facts]) for name in FIELDS if name != "dp"}


@settings(max_examples=400, deadline=None)
@given(JOBS, st.lists(JOBS, min_size=1, max_size=4))
def test_the_mask_of_many_says_what_is_said_of_one(first, others):
    jobs = [first, *(first.replace(layout=other.layout, gpus=other.gpus) for other in others)]
    legal = legal_mask(first, columns_of(jobs))
    assert legal.tolist() == [violations(one) == [] for one in jobs]


def test_the_mask_takes_the_jobs_own_layout_for_what_it_is_not_told():
    pytest.importorskip("numpy")
    assert legal_mask(job(gbs=8, tp=2, sp=True), {"tp": [1, 2, 4, 16]}).tolist() == [False, True, True, False]
    assert legal_mask(job(gbs=8), {"dp": [8, 4, 3], "tp": 2}).tolist() == [True, True, False]
    with pytest.raises(UserError, match="there is no column 'tpp'"):
        legal_mask(job(), {"tpp": [1]})


@pytest.mark.parametrize(
    ("broken", "rule", "says", "fix"),
    [
        ({"cp": 2, "gbs": 4, "seq": 30}, "seq_cp", "2 x cp 2 = 4, not 30", "seq 28 or 32"),
        ({"tp": 4, "sp": True, "gbs": 2, "seq": 30}, "seq_tp", "tp 4 x cp 1 = 4, not 30", "seq 28 or 32"),
        ({"tp": 3, "gpus": 3}, "heads", "heads 32 must be divisible by tp 3", "tp 2 or 4"),
        ({"tp": 16, "gpus": 16, "model": "llama3_8b"}, "kv_heads", "kv_heads 8 must be divisible by tp 16", "tp 8"),
        ({"pp": 8, "vp": 3, "gbs": 8}, "layers", "4 layers of pipeline rank 0 must be divisible by vp 3", "divisor"),
        ({"precision": "mxfp8", "gbs": 8}, "precision", "h100 (hopper)", "fp32"),
        ({"pp": 2, "vp": 2, "gbs": 8, "options": {"overlap_p2p": False}}, "vp_p2p", "silently wrong", "overlap_p2p"),
        ({"ep": 2, "gbs": 8}, "no_experts", "ep 2 requires a mixture of experts, but this model is dense", "set ep 1"),
        (
            {"ep": 3, "model": "mixtral_8x7b", "gpus": 6, "gbs": 6},
            "experts",
            "experts 8 must be divisible by ep 3",
            "ep 2",
        ),
        ({"tp": 2, "model": "mixtral_8x7b", "gbs": 8}, "experts_sp", "tp 2 require sequence parallelism", "set sp"),
        ({"gbs": 8, "recompute": "full", "recompute_layers": 5}, "recompute_groups", "recompute_layers 5", "layers 1"),
        (
            {"gbs": 8, "pp": 2, "sharding": "zero3"},
            "fsdp_pipeline",
            "does not support pipeline parallelism, but pp is 2",
            "zero1",
        ),
        ({"tp": 3, "gpus": 16}, "world", "= 3 must divide the number of GPUs, which is 16", "nearest: tp 2 or 4; or "),
        ({"tp": 3, "gpus": 16}, "world", "tp 3 x pp 1", "nearest sizes of complete nodes: 24 GPUs"),
        ({"tp": 4, "pp": 4, "gpus": 40}, "world", "= 16 must", "complete nodes: 32 or 48 GPUs"),
        ({"tp": 4, "gpus": 6}, "world", "= 4 must divide", "nearest: tp 3 or 6; or nearest sizes: 4 or 8 GPUs"),
        ({"tp": 0}, "positive", "tp must be at least 1, not 0", "set tp 1"),
        ({"gbs": 8, "vp": 1, "pp": 2}, "vp_of_one", "single chunk per rank (vp 1)", "remove vp"),
    ],
)
def test_a_broken_rule_is_named_with_its_numbers_and_the_nearest_change(broken, rule, says, fix):
    changes = dict(broken)
    shape = models.find(changes.pop("model", "llama3_8b"))
    broken_rules = {violation.rule: violation for violation in violations(job(shape, **changes))}
    assert says in broken_rules[rule].message
    assert fix in broken_rules[rule].fix


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(UserError, match=r"(?s)tp 3 .* must divide .*heads 32 .*mxfp8") as refused:
        require(job(tp=3, precision="mxfp8"))
    assert "nearest" in refused.value.hint
    require(job(tp=2, sp=True, gbs=8))


@pytest.mark.parametrize(
    ("layout", "rule"),
    [
        ({"tp": 16, "gpus": 16, "sp": True}, "tp_domain"),
        ({"pp": 4, "gbs": 4}, "bubble"),
        ({"seq": 8188, "gbs": 8, "precision": "fp8cs"}, "sizes"),
        ({"tp": 2, "gbs": 8}, "no_sp"),
        ({"gbs": 8, "recompute": "selective", "recompute_modules": ("moe",)}, "recompute_idle"),
    ],
)
def test_what_is_legal_and_bad_is_a_warning(layout, rule):
    assert rule in [warning.rule for warning in warnings(job(**layout))]


def test_no_rule_and_no_warning_against_the_published_layout_of_llama3_70b():
    good = job(models.find("llama3_70b"), gpus=64, tp=4, pp=4, vp=5, cp=2, sp=True, gbs=128)
    assert violations(good) == []
    assert warnings(good) == []


JUNK = st.one_of(
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=4),
    st.none(),
    st.booleans(),
    st.sampled_from([*CHOICES["recompute"], *CHOICES["sharding"], "uniform", "bf16", float("nan"), float("inf")]),
    st.lists(st.one_of(st.integers(-2, 9), st.sampled_from(MODULES)), max_size=4),
    st.lists(st.integers(-1, 40), max_size=4).map(tuple),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=1),
)
FACTS = ("gpus", "seq", "precision", "task", "layout", "options", "model")
HOSTILE = st.tuples(
    st.dictionaries(
        st.sampled_from(sorted(vars(Layout()))), st.one_of(JUNK, st.sampled_from([1, 2, 4, 8])), max_size=6
    ),
    st.dictionaries(st.sampled_from(sorted(vars(Options()))), JUNK, max_size=1),
    st.dictionaries(st.sampled_from(FACTS), JUNK, max_size=1),
    st.sampled_from([DENSE, *SMALL]),
)


def _answers(hostile):
    """Whatever a job is made of, it is judged or refused: any other exception fails the test."""
    layout, options, facts, model = hostile
    with contextlib.suppress(UserError):
        Layout.from_mapping(layout, "here").violations(8)
    with contextlib.suppress(UserError):
        made = job(model, options=options, **layout).replace(**facts)
        for broken_rules in (violations(made), warnings(made)):
            assert all(broken.rule and broken.message and broken.fix for broken in broken_rules)


@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(HOSTILE)
def test_hostile_input_is_judged_or_refused(hostile):
    _answers(hostile)


def _some(draw):
    """Junk of the kinds of JUNK, drawn plainly: hypothesis takes 6 ms for each, and shrinks those above."""
    kinds = (
        lambda: draw.randint(-9, 99),
        lambda: draw.choice((-1, 1)) * 2 ** draw.randint(0, 80) + draw.randint(-1, 1),
        lambda: draw.choice((draw.uniform(-9, 99), float("nan"), float("inf"), float("-inf"), -0.0, 5e-324, 1e308)),
        lambda: struct.unpack("d", draw.randbytes(8))[0],
        lambda: "".join(draw.choices("a1-_ \n\0é☃'\"$(){};", k=draw.randint(0, 4))),
        lambda: "".join(chr(draw.randint(0, 0x10FFFF)) for _ in range(draw.randint(0, 4))),
        lambda: draw.choice((None, True, False)),
        lambda: draw.choice([*CHOICES["recompute"], *CHOICES["sharding"], "uniform", "bf16"]),
        lambda: draw.choices([*range(-2, 10), *MODULES], k=draw.randint(0, 4)),
        lambda: tuple(draw.choices(range(-1, 41), k=draw.randint(0, 4))),
        lambda: {draw.choice(("", "tp", "é")): draw.randint(-9, 9)},
    )
    return draw.choice(kinds)()


@pytest.mark.slow
def test_hostile_input_is_judged_or_refused_a_hundred_thousand_times():
    draw = random.Random(20261122)
    fields, options = sorted(vars(Layout())), sorted(vars(Options()))
    for number in range(100_000):
        some = draw.sample(fields, draw.randint(0, 6))
        layout = {name: draw.choice((1, 2, 4, 8)) if draw.random() < 0.5 else _some(draw) for name in some}
        hostile = (
            layout,
            {draw.choice(options): _some(draw)} if draw.random() < 0.5 else {},
            {draw.choice(FACTS): _some(draw)} if draw.random() < 0.5 else {},
            draw.choice([DENSE, *SMALL]),
        )
        try:
            _answers(hostile)
        except Exception as error:
            raise AssertionError(f"input {number}: {hostile}") from error


@pytest.mark.parametrize(
    ("layout", "broken"),
    [
        ({"pp": 2, "chunks": (6, 0)}, True),
        ({"pp": 2, "chunks": (5, 1)}, False),
        ({"pp": 7, "loss_as_layer": True}, True),
        ({"pp": 4, "embedding_as_layer": True, "loss_as_layer": True}, False),
    ],
)
def test_multi_token_prediction_stands_beside_a_layer(layout, broken):
    """Megatron-Core 0.15.3 ends in an IndexError where the last chunk has no layer to build it like."""
    shape = SMALL[1]
    gpus = 8 * layout["pp"]
    run = PlannedJob(shape, H100, hardware.builtin().fabric_of(H100), gpus, 64, "bf16", Layout(gbs=gpus * 4, **layout))
    assert ("mtp_alone" in {broken_rule.rule for broken_rule in violations(run)}) is broken
    if layout.get("chunks") is None:
        fields = {"pp": [layout["pp"]], "loss_as_layer": [layout["loss_as_layer"]]}
        other = violations(run)
        assert bool(legal_mask(run, fields)[0]) is (not other)
