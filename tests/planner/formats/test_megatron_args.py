"""Megatron-LM's arguments as a job."""

import pytest

from superpod.errors import UserError
from superpod.planner import hardware, models
from superpod.planner.formats import megatron_args
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob


def base(**layout) -> PlannedJob:
    node = hardware.node("h100")
    gpt = models.ModelShape.from_shape(style="gpt", layers=12, hidden=512, heads=8, vocab=50257, positions=1024)
    return PlannedJob(gpt, node, hardware.builtin().fabric_of(node), 8, 1024, "bf16", Layout(gbs=32, **layout))


LINE = """torchrun pretrain_gpt.py \\
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 \\
    --sequence-parallel --use-distributed-optimizer --bf16 --swiglu --normalization RMSNorm --micro-batch-size=4 \\
    --untie-embeddings-and-output-weights --position-embedding-type rope --attention-dropout 0.0 --log-interval 1
"""


def test_a_command_line_becomes_a_job():
    job, unknown = megatron_args.apply(base(), megatron_args.parse(LINE))
    assert job.layout.short() == "TP2 PP4 VP3 SP"
    assert (job.layout.mbs, job.layout.gbs, job.layout.sharding) == (4, 32, "zero1")
    assert (job.model.gated, job.model.norm, job.model.tied, job.model.positions) == (True, "rms", False, 0)
    assert job.model.ffn == 1344  # Megatron's 2/3 of 4 x hidden, down to a multiple of 64
    assert job.options.attention_dropout == 0
    assert job.options.hidden_dropout == 0.1  # Megatron's default
    assert unknown == ["--log-interval 1"]


def test_the_two_spellings_say_the_same():
    line = megatron_args.parse("--sequence-parallel --num-experts 8 --moe-router-topk 2")
    pairs = megatron_args.parse("sequence-parallel=True; num-experts=8; moe-router-topk=2")
    jobs = [megatron_args.apply(base(tp=2), args)[0] for args in (line, pairs)]
    assert jobs[0] == jobs[1]
    assert jobs[0].layout.sp
    assert jobs[0].model.expert_ffn == jobs[0].model.ffn


def test_without_defaults_what_is_not_said_stays():
    job, _ = megatron_args.apply(base(), {"hidden-dropout": "0.2"}, defaults=False)
    assert job.options.hidden_dropout == 0.2
    assert job.options.fused_loss is base().options.fused_loss
    assert job.layout == base().layout


def test_a_pipeline_layout_gives_its_chunks():
    stages = {"num-layers": "16", "mtp-num-layers": "1", "pipeline-model-parallel-layout": "Et*3|(tt|)*6tmL"}
    job, _ = megatron_args.apply(base(pp=2), stages)
    assert (job.layout.vp, job.layout.chunks) == (4, (3, 2, 2, 2, 2, 2, 2, 1))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num-layers", "many"),
        ("swiglu", "perhaps"),
        ("attention-backend", "magic"),
        ("moe-layer-freq", "[1,0,1]"),
        ("pipeline-model-parallel-layout", "xyz"),
        ("hidden-dropout", "much"),
    ],
)
def test_a_value_that_cannot_be_is_named(name, value):
    with pytest.raises(UserError, match=f"--{name} .*invalid value"):
        megatron_args.apply(base(), {name: value})


def test_an_unclosed_quote_is_said():
    with pytest.raises(UserError, match="cannot be parsed"):
        megatron_args.parse("--data-path 'here")
