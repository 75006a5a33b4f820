"""The memory model against closed forms of the literature, against itself, and against measured runs where they are."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superpod.planner import columns, hardware, memory, models
from superpod.planner.hardware import GIB
from superpod.planner.layout import Layout
from superpod.planner.memory import model_states
from superpod.planner.memory.activations import blocks
from superpod.planner.memory.in_flight import in_flight
from superpod.planner.memory.units import MemoryUnits
from superpod.planner.planned_job import Options, PlannedJob

GPT = models.ModelShape.from_shape(
    style="gpt", layers=4, hidden=1024, heads=16, vocab=50304, positions=2048, tied=False
)
LLAMA, MOE, MLA = (models.find(name) for name in ("llama3_8b", "mixtral_8x7b", "deepseek_v2_lite"))
STATES = ("parameters", "gradients", "optimizer", "fp8_copies")
PAPER = Options(attention="unfused", hidden_dropout=0.1, attention_dropout=0.1, impl="local", fused_loss=False)
"""The GPT of arXiv:2205.05198: no flash attention, dropout everywhere."""


def job(model=GPT, gpus=1, seq=2048, gpu="h100", precision="bf16", task: Any = "pretrain", options=None, **layout):
    node = hardware.node(gpu)
    return PlannedJob(
        model=model,
        node=node,
        fabric=hardware.builtin().fabric_of(node),
        gpus=gpus,
        seq=seq,
        precision=precision,
        layout=Layout(**layout),
        task=task,
        options=options or Options(),
    )


def units(of: PlannedJob) -> MemoryUnits:
    return MemoryUnits(of, columns.from_job(of))


def layer_bytes(of: PlannedJob) -> float:
    """Bytes that one layer keeps, per token and hidden unit."""
    kept = sum(float(block.bytes.item()) for block in blocks(units(of)).values())
    return kept / (of.seq * of.layout.mbs * of.model.hidden)


def states(of: PlannedJob) -> np.ndarray:
    owners = memory.by_owner(of, columns.from_job(of))
    return np.add.reduce([owners[name] for name in STATES])


def total(of: PlannedJob) -> float:
    return float(memory.allocated(of, columns.from_job(of)).max())


# Table 2 of arXiv:2205.05198, bytes per layer / sbh. The paper leaves out statistics of norms; so do we.
SCORES = 5 * 16 * 2048 / 1024  # 5as/h


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({}, 34 + SCORES),
        ({"tp": 8}, 10 + 24 / 8 + SCORES / 8),
        ({"tp": 8, "sp": True}, (34 + SCORES) / 8),
        ({"tp": 8, "recompute": "selective"}, 10 + 24 / 8),
        ({"tp": 8, "sp": True, "recompute": "selective"}, 34 / 8),
    ],
)
def test_a_gpt_layer_keeps_what_table_2_says(layout, expected):
    gpus = layout.get("tp", 1)
    assert layer_bytes(job(gpus=gpus, options=PAPER, **layout)) == pytest.approx(expected, rel=1e-12)


def test_full_recomputation_keeps_2sbh_a_layer():
    of = job(options=PAPER, recompute="full", mbs=2, gbs=2)
    kept = memory.by_owner(of, columns.from_job(of))["activations"][0]
    assert kept == 2 * 2048 * 2 * 1024 * GPT.layers


def test_flash_attention_and_swiglu_follow_the_closed_form():
    h, q, kv, f, a = 4096, 4096, 1024, 14336, 32
    expected = 8 * h + 4 * q + 4 * kv + 6 * f + 4 * a
    assert layer_bytes(job(model=LLAMA)) * h == pytest.approx(expected, rel=1e-12)


def test_context_parallelism_divides_tokens():
    whole = memory.by_owner(job(model=LLAMA, gpus=1), columns.from_job(job(model=LLAMA, gpus=1)))["activations"][0]
    of = job(model=LLAMA, gpus=4, cp=4, gbs=1)
    assert memory.by_owner(of, columns.from_job(of))["activations"][0] == whole / 4


@pytest.mark.parametrize(
    ("options", "precision", "sharding", "dp", "expected"),
    [
        (Options(), "bf16", "none", 8, 18),
        (Options(), "bf16", "zero1", 8, 6 + 12 / 8),
        (Options(grads="bf16"), "bf16", "zero1", 8, 4 + 12 / 8),
        (Options(moments="bf16"), "bf16", "zero1", 8, 6 + 8 / 8),
        (Options(offload=0.5), "bf16", "zero1", 8, 6 + 6 / 8),
        (Options(), "bf16", "zero2", 8, 2 + 16 / 8),
        (Options(), "bf16", "zero3", 8, 18 / 8),
        (Options(), "fp16", "none", 8, 20),
        (Options(), "fp16", "zero1", 8, 4 + 16 / 8),
        (Options(), "fp32", "none", 8, 16),
        (Options(), "fp32", "zero1", 8, 8 + 8 / 8),
        (Options(framework="fsdp2"), "bf16", "zero3", 8, 16 / 8),
    ],
)
def test_bytes_per_parameter(options, precision, sharding, dp, expected):
    of = job(gpus=dp, gbs=dp, precision=precision, sharding=sharding, options=options)
    assert states(of)[0] / GPT.parameters().total == pytest.approx(expected, rel=1e-12)


def test_experts_are_sharded_over_the_expert_grid():
    of = job(model=MOE, gpus=16, gbs=16, ep=8)
    p = MOE.parameters(models.Split(ep=8))
    assert states(of)[0] == pytest.approx(p.dense * (6 + 12 / 16) + p.experts * (6 + 12 / 2), rel=1e-12)


@pytest.mark.parametrize("model", [LLAMA, MOE, MLA, models.find("qwen3_30b_a3b"), models.find("gpt3_175b")])
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"tp": 2, "pp": 2, "loss_as_layer": False}, {"tp": 4, "pp": 4}])
def test_parameters_are_those_of_the_model(model, layout):
    pp = layout.get("pp", 1)
    if model.layers % pp:
        layout = {**layout, "chunks": tuple(model.layers // pp + (i < model.layers % pp) for i in range(pp))}
    of = job(model=model, gpus=16, gbs=16, **layout)
    own = model_states.rank_parameters(units(of))
    exact = [model.parameters(of.split, stage) for stage in range(pp)]
    assert (own.dense + 0 * of.layout.pp).tolist() == [p.dense for p in exact]
    assert np.broadcast_to(own.experts, own.dense.shape).tolist() == [p.experts for p in exact]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"pp": 4, "gbs": 8}, [4, 3, 2, 1]),
        ({"pp": 4, "gbs": 2}, [2, 2, 2, 1]),
        # chunks 2 (p - r - 1) + (v - 1) p + 1, each half of the rank's layers
        ({"pp": 4, "vp": 2, "gbs": 8}, [5.5, 4.5, 3.5, 2.5]),
        ({"pp": 4, "vp": 2, "gbs": 4}, [4, 4, 3.5, 2.5]),
    ],
)
def test_micro_batches_in_flight(layout, expected):
    of = job(model=GPT.replace(layers=8), gpus=4, **layout)
    assert in_flight(units(of)).tolist() == expected


def test_a_chunk_with_a_layer_less_counts_so():
    # 6 layers on 4 x 2 chunks, embedding and loss as layers: the last rank holds one layer, in its first chunk
    of = job(model=GPT.replace(layers=6), gpus=4, pp=4, vp=2, gbs=8, embedding_as_layer=True, loss_as_layer=True)
    assert in_flight(units(of))[-1] == 4  # of its 5 chunks in flight, 4 are of the first
    assert in_flight(units(of))[0] == 4  # of the first rank's 11, 4 are of its second


def test_405b_of_mlperf_by_hand():
    # H100, DP 16, 126 layers, rank 0: 15 layers and the embedding; 71 chunks in flight, 15 of them of one layer
    model = models.find("llama31_405b").replace(vocab=32000)
    options = Options(fp8_params=True, grads="bf16")
    of = job(
        model=model, gpus=2048, seq=8192, precision="fp8", options=options, tp=8, pp=8, vp=8, cp=2, sp=True, gbs=1152,
        embedding_as_layer=True, loss_as_layer=True,
    )  # fmt: skip
    owners = memory.by_owner(of, columns.from_job(of))
    h, q, kv, f, a = 16384, 16384, 1024, 53248, 128
    token = 6 * h + 5 * q + 4 * kv + 5 * f + 4 * a  # FP8 keeps one byte of each product's input
    assert owners["activations"][0] == pytest.approx((142 - 15) * token * 4096 / 8, rel=1e-12)
    assert np.add.reduce(list(owners.values()))[0] / GIB == pytest.approx(
        52.484, rel=0.01
    )  # measured: MLPerf training v5.0


def test_unfused_attention_of_8192_is_17_gb_a_layer():
    # 32 heads, batch 4, fp16 scores alone: 4 x 32 x 8192^2 x 2 bytes = 17.2 GB
    model = LLAMA.replace(layers=1)
    flash = job(model=model, seq=8192, mbs=4, gbs=4)
    unfused = flash.replace(options=Options(attention="unfused"))
    kept = [memory.by_owner(of, columns.from_job(of))["activations"][0] for of in (flash, unfused)]
    assert kept[1] - kept[0] + 4 * 32 * 8192 * 4 == 4 * 32 * 8192**2 * 2


def test_cuda_graphs_keep_the_attention_in_a_pool_of_their_own():
    of = job(model=LLAMA, gpus=4, pp=4, gbs=8, tp=1)
    eager, graphed = (memory.peak(x, columns.from_job(x)) for x in (of, of.replace(options=Options(cuda_graphs=True))))
    size = 2 * 2048 * 4096  # hidden states of a micro-batch
    flights, layers = np.array([4, 3, 2, 1]), 8
    assert (graphed.allocated < eager.allocated).all()
    assert graphed.owners["buffers"] - eager.owners["buffers"] == pytest.approx(4 * size * flights * layers)
    assert (graphed.needed > eager.needed).all()  # their buffers come on top
    scores = Options(attention="unfused", cuda_graphs=True)
    captured = memory.peak(of.replace(options=scores), columns.from_job(of))  # in which nothing but attention is held
    one = 2 * 32 * 2048**2  # scores of a layer
    assert 4 * 8 * one < captured.owners["activations"][0] < 4 * 8 * one * 1.3
    assert one < captured.owners["transient"][0] < 1.3 * one


@pytest.mark.parametrize(
    ("module", "model"),
    [("core_attn", LLAMA), ("layernorm", MOE), ("layernorm", MLA), ("mlp", LLAMA), ("mla_up_proj", MLA),
     ("moe_act", MOE), ("moe", MOE), ("shared_experts", MLA)],
)  # fmt: skip
def test_each_module_of_selective_recomputation_frees_some(module, model):
    # The last rank's peak is the loss: there, nothing is brought back yet.
    none = job(model=model)
    some = job(model=model, recompute="selective", recompute_modules=(module,))
    before, after = (memory.by_owner(of, columns.from_job(of))["activations"][0] for of in (none, some))
    assert after < before
    assert total(some) < total(none)


def test_lora_freezes_the_base():
    of = job(model=LLAMA, gpus=8, gbs=8, task="lora", options=Options(lora_rank=16))
    owners = memory.by_owner(of, columns.from_job(of))
    h, q, kv, f = 4096, 4096, 1024, 14336
    adapters = 16 * 32 * ((h + q + 2 * kv) + (q + h) + (h + 2 * f) + (f + h))
    assert owners["gradients"][0] == 4 * adapters
    assert owners["parameters"][0] == 2 * (LLAMA.parameters().total + adapters)
    attention_only = of.replace(options=Options(lora_rank=16, lora_targets=("linear_qkv", "linear_proj")))
    assert total(attention_only) < total(of) < total(of.replace(task="sft"))


def test_fp8_keeps_copies_or_parameters():
    def owners(gpu, **options):
        of = job(model=LLAMA, gpu=gpu, precision="fp8cs", options=Options(**options))
        return memory.by_owner(of, columns.from_job(of))

    layers = LLAMA.parameters().attention + LLAMA.parameters().mlp
    assert owners("h100")["fp8_copies"][0] == 2 * layers
    assert owners("b200")["fp8_copies"][0] == layers
    whole = 2 * LLAMA.parameters().total
    assert owners("b200", fp8_params=True)["parameters"][0] == whole - layers


def test_capacity_bounds_and_imbalance_raises_what_experts_hold():
    dropless = job(model=MOE, ep=8, gpus=8, gbs=8)
    assert total(dropless.replace(options=Options(capacity=1.0))) == total(dropless)
    assert total(dropless.replace(options=Options(imbalance=1.5))) > total(dropless)


def test_multi_token_prediction_is_on_the_last_rank():
    plain = job(model=MLA.replace(dense_first=0, layers=24), gpus=4, pp=4, gbs=4)
    more = plain.replace(model=plain.model.replace(mtp_layers=1))
    difference = memory.allocated(more, columns.from_job(more)) - memory.allocated(plain, columns.from_job(plain))
    assert difference[-1] > 0
    assert not difference[:-1].any()


# Properties

DEGREES = st.sampled_from([1, 2, 4, 8])


@st.composite
def jobs(draw):
    model = draw(st.sampled_from([LLAMA, models.find("llama3_70b"), MOE, models.find("nemotron4_15b")]))
    tp, pp, cp, dp = draw(DEGREES), draw(st.sampled_from([1, 2, 4])), draw(DEGREES), draw(DEGREES)
    layout = {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "sp": tp > 1 and draw(st.booleans()),
        "mbs": draw(st.sampled_from([1, 2])),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "sharding": draw(st.sampled_from(["none", "zero1", "zero2", "zero3"])),
    }
    gbs = layout["mbs"] * dp * draw(st.sampled_from([8, 16]))
    precision = draw(st.sampled_from(["bf16", "fp8cs"]))
    options = Options(loss_impl=draw(st.sampled_from(["te", "native"])), grads=draw(st.sampled_from(["fp32", "bf16"])))
    return job(model=model, gpus=tp * pp * cp * dp, seq=8192, precision=precision, options=options, gbs=gbs, **layout)


def with_layout(of: PlannedJob, gpus: int, **changes) -> PlannedJob:
    return of.replace(gpus=gpus, layout=of.layout.replace(**changes))


@settings(max_examples=150, deadline=None)
@given(jobs())
def test_memory_never_grows_with_tensor_parallelism(of):
    if of.layout.tp < 8:
        assert total(with_layout(of, of.gpus * 2, tp=of.layout.tp * 2)) <= total(of) * (1 + 1e-9)


@settings(max_examples=150, deadline=None)
@given(jobs())
def test_memory_of_the_states_never_grows_with_pipeline_parallelism(of):
    # Activations of the first rank stay: half the layers, twice the micro-batches. Buffers to receive into are new.
    more = with_layout(of, of.gpus * 2, pp=of.layout.pp * 2)
    assert states(more).max() <= states(of).max()
    received = 2 * 2 * of.model.hidden * of.seq * of.layout.mbs
    assert total(more) <= total(of) + received


@settings(max_examples=150, deadline=None)
@given(jobs())
def test_memory_of_the_states_never_grows_with_zero(of):
    sizes = [states(with_layout(of, of.gpus, sharding=s)).max() for s in ("none", "zero1", "zero2", "zero3")]
    assert sizes == sorted(sizes, reverse=True)


@settings(max_examples=100, deadline=None)
@given(jobs())
def test_memory_never_falls_with_more_sequence_or_batch(of):
    # The same where the optimizer's step is the peak: no activations are left by then.
    more = with_layout(of, of.gpus, mbs=of.layout.mbs * 2, gbs=of.layout.gbs * 2)
    at_step = any(memory.by_owner(of, columns.from_job(of))["activations"] == 0)
    for bigger in (of.replace(seq=of.seq * 2), more):
        assert total(bigger) >= total(of) if at_step else total(bigger) > total(of)


@settings(max_examples=100, deadline=None)
@given(jobs())
def test_recomputation_never_adds(of):
    none, selective, full = (total(with_layout(of, of.gpus, recompute=r)) for r in ("none", "selective", "full"))
    assert full <= none
    assert selective <= none * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(jobs())
def test_every_owner_is_a_number_of_bytes(of):
    owners = memory.by_owner(of, columns.from_job(of))
    for name, size in owners.items():
        assert size.shape == (of.layout.pp,), name
        assert np.isfinite(size).all(), name
        assert (size >= 0).all(), name
    assert (memory.reserved(of, columns.from_job(of)) > memory.allocated(of, columns.from_job(of))).all()


# Many at once


def many(layouts: int) -> tuple[PlannedJob, columns.Columns]:
    rng = np.random.default_rng(0)

    def draw(*values):
        return rng.choice(values, (layouts, 1)).astype(np.int64)

    own = {
        "tp": draw(1, 2, 4, 8), "pp": draw(4, 8), "vp": draw(1, 2), "cp": draw(1, 2), "ep": draw(1), "etp": draw(1),
        "dp": draw(8, 16), "sp": draw(0, 1), "mbs": draw(1, 2), "micro_batches": draw(8, 16),
        "recompute": draw(0, 1, 2), "recompute_block": draw(0, 1), "recompute_layers": draw(1, 2),
        "modules": draw(0, 1, 16), "sharding": draw(0, 1, 2, 3),
    }  # fmt: skip
    shape = (layouts, 3)
    rank = np.concatenate([np.zeros((layouts, 1), int), np.ones((layouts, 1), int), own["pp"] - 1], axis=1)
    eight = np.full(shape, 8)
    table = columns.Columns(
        **own, rank=rank, weight=np.ones(shape, int), blocks={"attention": eight, "mlp": eight}, layers=eight
    )
    return job(model=models.find("llama3_70b"), gpus=1024, seq=8192, gbs=1024), table


def test_one_row_of_many_is_what_it_is_alone():
    of, table = many(50)
    whole = memory.by_owner(of, table)
    for row in range(50):
        cut = {f.name: getattr(table, f.name) for f in dataclasses.fields(table)}
        cells: dict[str, Any] = {
            name: {kind: c[row] for kind, c in value.items()} if name == "blocks" else value[row]
            for name, value in cut.items()
        }
        alone = columns.Columns(**cells)
        single = memory.by_owner(of, alone)
        for owner, size in whole.items():
            assert size[row] == pytest.approx(single[owner], rel=1e-12), owner


# Limits, checkpoints


def test_the_verdict_goes_by_the_fullest_rank():
    big = models.find("llama3_70b")
    assert memory.fit(job(model=big, gpus=64, gbs=64, tp=4, sp=True)) == "does not fit"
    of = job(model=big, gpus=64, gbs=64, tp=4, pp=4, sp=True)
    assert memory.fit(of) == "fits"
    assert memory.limit(of) < of.node.gpu.hbm_usable_bytes


def test_checkpoints_hold_14_bytes_a_parameter():
    assert memory.checkpoint_bytes(job(model=LLAMA)) == 14 * LLAMA.parameters().total
    assert memory.checkpoint_bytes(job(model=LLAMA, task="lora")) < 0.02 * memory.checkpoint_bytes(job(model=LLAMA))
