import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superpod.planner import hardware, models
from superpod.planner.errors import UserError
from superpod.planner.job import Job, Options
from superpod.planner.layout import CHOICES, MODULES, Layout
from superpod.planner.legality import FIELDS, legal_mask, violations
from superpod.planner.models import Model

H100 = hardware.node("h100")
DENSE = models.find("llama3_8b")
SMALL = [
    Model.from_shape(name="dense", layers=8, hidden=64, heads=8, kv_heads=4, ffn=96, vocab=100),
    Model.from_shape(
        name="moe", layers=6, hidden=64, heads=8, vocab=96, experts=8, topk=2, expert_ffn=48, mtp_layers=1
    ),
    Model.from_shape(
        name="mla", layers=6, hidden=64, heads=4, ffn=96, vocab=64, kv_lora=32, qk_nope_dim=16, v_dim=16, bias=True
    ),
    Model.from_shape(
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
    return Job(model, H100, fabric, gpus, seq, precision, Layout(**layout), options=Options(**(options or {})))


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
    facts = [{**vars(j.layout.facts(j.gpus)), **{k: getattr(j.layout, k) for k in FIELDS[-2:]}} for j in jobs]
    return {name: numpy.array([each[name] for each in facts]) for name in FIELDS if name != "dp"}


@settings(max_examples=400, deadline=None)
@given(JOBS, st.lists(JOBS, min_size=1, max_size=4))
def test_the_mask_of_many_says_what_is_said_of_one(first, others):
    jobs = [first, *(first.replace(layout=other.layout, gpus=other.gpus) for other in others)]
    legal = legal_mask(first, columns_of(jobs))
    assert legal.tolist() == [violations(each) == [] for each in jobs]


def test_the_mask_takes_the_jobs_own_layout_for_what_it_is_not_told():
    pytest.importorskip("numpy")
    assert legal_mask(job(gbs=8, tp=2, sp=True), {"tp": [1, 2, 4, 16]}).tolist() == [False, True, True, False]
    assert legal_mask(job(gbs=8), {"dp": [8, 4, 3], "tp": 2}).tolist() == [True, True, False]
    with pytest.raises(UserError, match="no column is called 'tpp'"):
        legal_mask(job(), {"tpp": [1]})
