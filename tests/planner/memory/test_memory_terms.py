"""Bytes of single terms of the memory model, counted by hand for models so small that every term shows.

The counts follow the docstrings of `memory/`: what Megatron-Core 0.15 and Transformer Engine 2.x keep, op by op.
"""

import importlib
from typing import Any

import numpy as np
import pytest

from superpod.planner import columns, memory
from superpod.planner.hardware import GIB
from superpod.planner.memory import activations, lora, model_states
from superpod.planner.memory.in_flight import activations_in_flight, in_flight
from superpod.planner.memory.units import MemoryUnits
from superpod.planner.models import ModelShape
from superpod.planner.planned_job import Options
from tests.planner.memory.test_memory import job, units

peak = importlib.import_module("superpod.planner.memory.peak")  # the package has a function of that name
SEQ = 16


def shape(**more: Any) -> ModelShape:
    sizes = {"layers": 2, "hidden": 10, "heads": 4, "kv_heads": 2, "head_dim": 3, "ffn": 7, "vocab": 128, "norm": "rms"}
    return ModelShape(**{"name": "tiny", **sizes, **more})


DENSE = shape()
MLA = shape(heads=2, kv_heads=2, kv_lora=7, q_lora=5, qk_nope_dim=4, qk_rope_dim=2, v_dim=3)
MOE = shape(experts=4, topk=2, expert_ffn=6, shared_ffn=5)
MAMBA = shape(pattern="MM", mamba_heads=2, mamba_head_dim=3, mamba_groups=1, mamba_state=4)
DELTA = shape(delta_every=2, delta_key_heads=2, delta_key_dim=3, delta_value_heads=2, delta_value_dim=5)


def of(model=DENSE, *, gpus=None, **more) -> MemoryUnits:
    gpus = gpus or more.get("tp", 1) * more.get("cp", 1) * more.get("pp", 1)
    options = Options(**more.pop("options", {}))
    return units(job(model, gpus=gpus, seq=SEQ, options=options, **more))


def per_token(u: MemoryUnits, kind: str) -> tuple[float, float, float]:
    """(kept, restored by recomputation, backward) bytes per token of the whole sequence and micro-batch."""
    block = activations.blocks(u)[kind]
    sizes = (np.broadcast_to(part, (1, 1)).item() for part in (block.bytes, block.recomputed, block.backward))
    kept, recomputed, backward = (size / SEQ for size in sizes)
    return kept, recomputed, backward


# q = 4 x 3 = 12 and kv = 2 x 3 = 6 channels. Norm: input and output 2 x 2 x 10; queries, keys, values 2 x 24;
# the projection's input 2 x 12; one fp32 statistic for each of 4 heads.
ATTENTION = 40 + 48 + 24 + 16


@pytest.mark.parametrize(
    ("model", "kind", "more", "expected"),
    [
        ({}, "attention", {}, (ATTENTION, 0, 48)),
        ({}, "attention", {"mbs": 3, "gbs": 3}, (3 * ATTENTION, 0, 3 * 48)),
        ({"attention_gate": True}, "attention", {}, (ATTENTION + 24, 0, 48)),
        ({"qk_norm": True}, "attention", {}, (ATTENTION + 2 * 18, 0, 48)),
        ({"post_norms": True}, "attention", {}, (ATTENTION + 20, 0, 48)),
        ({}, "attention", {"options": {"hidden_dropout": 0.1}}, (ATTENTION + 10, 0, 48)),
        ({}, "attention", {"tp": 2}, (40 + (48 + 24 + 16) / 2, 0, 24)),
        ({}, "attention", {"tp": 2, "sp": True}, (ATTENTION / 2, 0, 24)),
        ({}, "attention", {"cp": 2}, (ATTENTION / 2, 0, 24)),
        ({}, "attention", {"cp": 2, "options": {"cp_comm": "a2a"}}, ((ATTENTION + 24) / 2, 0, 24)),
        # FP8 keeps inputs of products in 1 byte: the norm's output, and the projection's beside attention's own
        ({}, "attention", {"precision": "fp8cs"}, (20 + 10 + 48 + 24 + 12 + 16, 0, 48)),
        ({}, "attention", {"precision": "fp32"}, (2 * (ATTENTION - 16) + 16, 0, 96)),
        # scores of 16 keys: 2 bytes of softmax, with dropout a mask and an output; the backward pass holds gradients
        ({}, "attention", {"options": {"attention": "unfused"}}, (ATTENTION - 16 + 2 * 16 * 4, 0, 48 + 2 * 16 * 4)),
        (
            {},
            "attention",
            {"options": {"attention": "unfused", "attention_dropout": 0.1}},
            (ATTENTION - 16 + 5 * 16 * 4, 0, 48 + 4 * 16 * 4),
        ),
        # a soft cap keeps its tanh, and keys and values for each of the four heads: 2 x 2 x (4 - 2) x 3
        (
            {"soft_capped": True},
            "attention",
            {},
            (ATTENTION - 16 + (2 + 2) * 16 * 4 + 24, 0, 48 + (2 + 4) * 16 * 4),
        ),
        ({}, "attention", {"recompute": "selective", "recompute_modules": ("core_attn",)}, (ATTENTION - 16, 16, 48)),
        # norm, gate and up 2 x 14, the activation's output 2 x 7
        ({}, "mlp", {}, (40 + 28 + 14, 0, 14 + 20)),
        ({"ffn": 70}, "mlp", {}, (40 + 280 + 140, 0, 280)),
        ({"gated": False, "ffn": 70}, "mlp", {}, (40 + 140 + 140, 0, 140 + 20)),
        ({}, "mlp", {"tp": 2}, (40 + (28 + 14) / 2, 0, 7 + 20)),
        ({}, "mlp", {"recompute": "selective", "recompute_modules": ("mlp",)}, (20, 20 + 28 + 14, 34)),
    ],
)
def test_bytes_of_dense_blocks(model, kind, more, expected):
    assert per_token(of(shape(**model), **more), kind) == pytest.approx(expected, rel=1e-12)


# qk = 2 x 6 = 12, v = 2 x 3 = 6. Norm 40; latents twice 2 x (5 + 7) and the shared rotary key 2 x 2; heads
# 2 x (12 + 12 + 6); the projection's input 2 x 6 and two statistics.
LATENT = 40 + 48 + 4 + 60 + 12 + 8


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, (LATENT, 0, 60)),
        ({"tp": 2}, (40 + 52 + (60 + 12 + 8) / 2, 0, 30)),
        # the norm's output once for each of two products, in 1 byte; the latents' copies too
        ({"precision": "fp8cs"}, (20 + 20 + 36 + 4 + 60 + 12 + 6 + 8, 0, 60)),
        ({"recompute": "selective", "recompute_modules": ("mla_up_proj",)}, (LATENT - 60, 60, 60)),
        ({"recompute": "selective", "recompute_modules": ("layernorm",)}, (LATENT - 20, 20, 60)),
        ({"recompute": "selective", "recompute_modules": ("core_attn", "mla_up_proj")}, (LATENT - 68, 68, 60)),
        ({"options": {"attention": "unfused"}}, (LATENT - 8 + 2 * 16 * 2, 0, 60 + 2 * 16 * 2)),
    ],
)
def test_bytes_of_latent_attention(more, expected):
    assert per_token(of(MLA, **more), "mla") == pytest.approx(expected, rel=1e-12)


# Two rows a token. Norm 40; routing 13 x 4; dispatched input and 8 bytes a row 2 x 28; gate and up 2 x 24; the
# activation's output 2 x 12; shared experts 2 x 10 + 2 x 5.
EXPERTS = 40 + 52 + 56 + 48 + 24 + 30
BACKWARD = 48 + 40 + 20


@pytest.mark.parametrize(
    ("model", "more", "expected"),
    [
        ({}, {}, (EXPERTS, 0, BACKWARD)),
        ({"shared_ffn": 0}, {}, (EXPERTS - 30, 0, BACKWARD)),
        # three rows of four, and the busiest rank's
        ({}, {"options": {"capacity": 1.5}}, (40 + 52 + 30 + 1.5 * 128, 0, 1.5 * 88 + 20)),
        ({}, {"options": {"imbalance": 2.0}}, (40 + 52 + 30 + 2 * 128, 0, 2 * 88 + 20)),
        # without a gate the router's probability needs the activation's output
        ({"gated": False}, {}, (40 + 52 + 56 + 24 + 24 + 24 + 20, 0, 24 + 40 + 20)),
        # before 0.12 it came after the experts, and kept their output
        ({}, {"options": {"release": "mcore 0.11"}}, (EXPERTS + 40, 0, BACKWARD)),
        ({}, {"options": {"release": "mcore 0.12"}}, (EXPERTS, 0, BACKWARD)),
        ({"clamped": True}, {}, (EXPERTS + 48, 0, BACKWARD)),
        # experts on a latent of 3: 2 x (2 x 3 + 8) dispatched, 2 x 3 of the latent itself
        ({"latent": 3}, {}, (EXPERTS - 28 + 6, 0, 48 + 12 + 20)),
        # FP8: the norm's output and what products keep in 1 byte; the shared experts' input once more
        ({}, {"precision": "fp8cs"}, (30 + 52 + 2 * 18 + 48 + 12 + 20 + 5 + 10, 0, BACKWARD)),
        ({}, {"recompute": "selective", "recompute_modules": ("moe_act",)}, (EXPERTS - 24, 24, BACKWARD)),
        ({}, {"recompute": "selective", "recompute_modules": ("shared_experts",)}, (EXPERTS - 30, 30, BACKWARD)),
        ({}, {"recompute": "selective", "recompute_modules": ("layernorm",)}, (EXPERTS - 20, 20, BACKWARD)),
        ({}, {"recompute": "selective", "recompute_modules": ("moe",)}, (40, EXPERTS - 40, BACKWARD)),
    ],
)
def test_bytes_of_experts(model, more, expected):
    small = shape(**{"experts": 4, "topk": 2, "expert_ffn": 6, "shared_ffn": 5, **model})
    assert per_token(of(small, **more), "moe") == pytest.approx(expected, rel=1e-12)


def test_experts_under_tensor_parallelism_have_their_own_degree():
    """tp 2, etp 1: a rank has half of the tokens' rows and the experts' whole width."""
    kept, _, backward = per_token(of(MOE, tp=2, sp=True, etp=1), "moe")
    assert (kept, backward) == pytest.approx((EXPERTS / 2, BACKWARD / 2))
    kept, _, _ = per_token(of(MOE, tp=2, sp=True, etp=2), "moe")
    assert kept == pytest.approx((40 + 52 + 30) / 2 + 56 + (48 + 24) / 2)


def test_bytes_of_recurrent_blocks():
    # Mamba: inner 6, states 2 x 4. Norm 40; in_proj 2 x (12 + 8 + 2); the scan's output twice 2 x 6.
    assert per_token(of(MAMBA), "mamba") == pytest.approx((40 + 44 + 24, 0, 44 + 28))
    # Delta: keys 6, values 10. in_proj 2 x (12 + 20 + 4); convolution 2 x 22; recurrence and gated norm 3 x 2 x 10.
    assert per_token(of(DELTA), "delta") == pytest.approx((40 + 72 + 44 + 60, 0, 72 + 104))
    assert per_token(of(DELTA, tp=2), "delta")[0] == pytest.approx(40 + 176 / 2)


@pytest.mark.parametrize(
    ("precision", "gpu", "narrow", "copies"),
    [
        ("bf16", "h100", 2, 2),
        ("fp32", "h100", 4, 2),
        ("fp8cs", "h100", 1, 2),  # Hopper multiplies FP8 in one memory order only
        ("fp8ds", "b200", 1, 1),
        ("fp8bw", "h100", 1 + 4 / 128, 2),  # an fp32 scale for 128 numbers
        ("mxfp8", "b200", 1 + 1 / 32, 2),  # a byte for 32
        ("nvfp4", "b200", 1 / 2 + 1 / 16, 2),  # a byte for 16
    ],
)
def test_bytes_of_number_formats(precision, gpu, narrow, copies):
    u = of(precision=precision, gpu=gpu)
    assert u.gemm_input_bytes == narrow
    assert u.fp8_copies == copies
    assert u.is_fp8 == (precision not in ("bf16", "fp32"))
    assert u.act_bytes == (4 if precision == "fp32" else 2)


def test_what_is_not_quantised_may_be_fp32():
    assert of(precision="fp8cs", options={"unquantised": "fp32"}).act_bytes == 4
    assert of(options={"unquantised": "fp32"}).act_bytes == 2


def test_under_lora_only_adapted_products_keep_their_input():
    u = of(task="lora", precision="fp8cs", options={"lora_targets": ("linear_qkv",)})
    assert (u.saved_input_bytes("linear_qkv"), u.saved_input_bytes("linear_fc1")) == (2, 0)
    assert of(task="lora", options={"lora_dropout": 0.1}).saved_input_bytes("linear_qkv") == 3


@pytest.mark.parametrize(("release", "version"), [("mcore 0.11", 0.11), ("NeMo 25.09", 0.15), ("", 0.15)])
def test_the_version_of_megatron(release, version):
    assert of(options={"release": release}).mcore == version


# Adapters of rank 2: two matrices a target, in x 2 and 2 x out.
@pytest.mark.parametrize(
    ("model", "targets", "layer"),
    [
        (DENSE, ("linear_qkv",), 10 + 24),
        (DENSE, ("linear_proj",), 12 + 10),
        (DENSE, ("linear_fc1",), 10 + 14),
        (DENSE, ("linear_fc2",), 7 + 10),
        (shape(gated=False), ("linear_fc1",), 10 + 7),
        (MOE, ("linear_fc1", "linear_fc2"), 10 + 12 + 6 + 10),
        (MLA, ("linear_q_down_proj", "linear_q_up_proj"), 10 + 5 + 5 + 12),
        (MLA, ("linear_kv_down_proj",), 10 + 7 + 2),
        (MLA, ("linear_kv_up_proj",), 7 + 2 * (4 + 3)),
        (MLA, ("linear_proj",), 6 + 10),
        (shape(heads=2, kv_heads=2, kv_lora=7, qk_nope_dim=4, qk_rope_dim=2, v_dim=3), ("linear_q_proj",), 10 + 12),
        (MAMBA, ("linear_fc1",), 10),
    ],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_parameters_of_adapters(model, targets, layer, tp):
    u = of(model, tp=tp, task="lora", options={"lora_rank": 2, "lora_targets": targets})
    made = lora.adapters(u)
    assert made.dense.item() == 2 * 2 * layer / tp
    assert made.experts.item() == 0


# Weight gradients that exist for autograd only: 2 bytes for each distinct shape of a layer, and for the head.
HEAD = 128 * 10


@pytest.mark.parametrize(
    ("model", "elements"),
    [
        (DENSE, 24 * 10 + 10 * 12 + 14 * 10 + 10 * 7),
        (shape(attention_gate=True), 36 * 10 + 10 * 12 + 14 * 10 + 10 * 7),
        (shape(gated=False), 24 * 10 + 10 * 12 + 7 * 10 + 10 * 7),
        (MOE, 24 * 10 + 10 * 12 + 12 * 10 + 10 * 6 + 10 * 10 + 10 * 5),
        (shape(experts=4, topk=2, expert_ffn=6, latent=3), 24 * 10 + 10 * 12 + 12 * 3 + 3 * 6),
        (MLA, 5 * 10 + 12 * 5 + 9 * 10 + 14 * 7 + 10 * 6 + 14 * 10 + 10 * 7),
        (MAMBA, 12 * 10 + 10 * 6),
        (DELTA, 20 * 10 + 10 * 10 + 24 * 10 + 10 * 12 + 14 * 10 + 10 * 7),
    ],
)
def test_dummies_of_weight_gradients(model, elements):
    assert peak._wgrad_dummy_bytes(of(model)).item() == 2 * (elements + HEAD)


@pytest.mark.parametrize("more", [{"options": {"grad_fusion": False}}, {"options": {"impl": "local"}},
                                  {"options": {"framework": "fsdp2"}}, {"task": "lora"}])  # fmt: skip
def test_no_dummies_without_fused_accumulation(more):
    assert peak._wgrad_dummy_bytes(of(**more)).item() == 0


def test_what_tensor_parallelism_splits_of_the_dummies():
    assert peak._wgrad_dummy_bytes(of(tp=2)).item() == 570 + 256 * 10 / 2 * 2  # the vocabulary is padded to 128 x tp
    assert peak._wgrad_dummy_bytes(of(MLA, tp=2)).item() == 2 * (140 + (60 + 98 + 60 + 210) / 2) + 2560


@pytest.mark.parametrize(
    ("model", "more", "mib"),
    [
        (DENSE, {}, 2 * 32 + 32),
        (DENSE, {"gpu": "a100"}, 2 * 8 + 4),
        (DENSE, {"gpu": "a100", "options": {"deterministic": True}}, 2 * 32 + 4),
        (MOE, {}, 2 * 32 + 5 * 32),
        (MOE, {"options": {"grouped_gemm": False}}, 2 * 32 + 32),
        (MOE, {"options": {"impl": "local"}}, 2 * 32 + 32),
    ],
)
def test_workspaces_of_cublas(model, more, mib):
    assert peak._workspace_bytes(of(model, **more)) == mib * 2**20


def test_buffers_of_a_pipeline_rank():
    u = of(pp=2, tp=2, sp=True, gbs=2)
    extra = peak._buffer_bytes(u) - peak._workspace_bytes(u)
    assert extra.tolist() == [0, 2 * 10 * SEQ + 2 * 10 * SEQ / 2]  # gathered whole; received as the part it is
    assert (peak._buffer_bytes(of(pp=2, tp=2, gbs=2)) - peak._workspace_bytes(u)).tolist() == [0, 2 * 10 * SEQ]


@pytest.mark.parametrize(
    ("more", "kept", "moment"),
    [
        ({}, 4, 4 + 2),  # fp32; the compiled copy and the BF16 ones
        ({"options": {"release": "mcore 0.11"}}, 4, 8 + 2),
        ({"options": {"fused_loss": False}}, 4, 2),
        ({"options": {"loss_impl": "te"}}, 2, 0),
        ({"options": {"framework": "fsdp2"}}, 2 + 8, 4),
        ({"precision": "fp32"}, 4, 4),
    ],
)
def test_bytes_of_the_loss(more, kept, moment):
    assert peak._logits_bytes(of(**more)).item() == (kept + moment) * SEQ * 128
    assert peak._logits_bytes(of(**more, tp=2)).item() == (kept + moment) * SEQ * 256 / 2  # padded to 128 x tp
    assert peak._logits_bytes(of(shape(mtp_layers=2), **more)).item() == (3 * kept + moment) * SEQ * 128


def test_the_heads_input_gradient_is_whole_before_it_is_scattered():
    token = 2 * 10 * SEQ
    assert peak._head_bytes(of()).item() == 3 * token
    assert peak._head_bytes(of(tp=2)).item() == 4 * token
    assert peak._head_bytes(of(tp=2, sp=True)).item() == (2 / 2 + 1 + 1 / 2) * token


def held(u):
    return model_states.rank_parameters(u)


def test_zero_2_and_3_gather_two_layers():
    own = held(of())
    layer = (own.dense - own.ends).item() / 2
    ends = own.ends.item()
    assert peak._gathered_bytes(of(gpus=2, gbs=2), held(of(gpus=2, gbs=2))).item() == 0
    for sharding, expected in (("zero2", 4 * 2 * layer), ("zero3", 4 * 2 * layer + 2 * (2 * layer + ends))):
        u = of(gpus=2, gbs=2, sharding=sharding)
        assert peak._gathered_bytes(u, held(u)).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("more", "there"),
    [
        ({"options": {"grads": "bf16"}}, True),
        ({}, False),
        ({"precision": "fp16"}, False),
        ({"options": {"grads": "bf16", "moments": "bf16"}}, False),
    ],
)
def test_the_optimizers_step_copies_two_byte_gradients(more, there):
    u = of(MOE, gpus=4, ep=2, gbs=4, **more)
    own = held(u)
    expected = 4 * (own.dense.item() / 4 + own.experts.item() / 2) if there else 0
    assert peak._optimizer_step_bytes(u, own).item() == pytest.approx(expected)
    if there:
        whole = of(MOE, gpus=4, ep=2, gbs=4, sharding="none", **more)
        assert peak._optimizer_step_bytes(whole, own).item() == pytest.approx(
            4 * (own.dense.item() + own.experts.item())
        )


@pytest.mark.parametrize(
    ("sharding", "dense", "experts"),
    [
        ("none", (2, 4, 12), (2, 4, 12)),
        ("zero1", (2, 4, 12 / 4), (2, 4, 12 / 2)),
        ("zero2", (2, 4 / 4, 12 / 4), (2, 4 / 2, 12 / 2)),
        ("zero3", (2 / 4, 4 / 4, 12 / 4), (2 / 2, 4 / 2, 12 / 2)),
    ],
)
def test_experts_are_sharded_over_their_own_ranks(sharding, dense, experts):
    u = of(MOE, gpus=4, ep=2, gbs=4, sharding=sharding)
    own = held(u)
    owners = model_states.by_owner(u, own)
    for name, of_dense, of_experts in zip(("parameters", "gradients", "optimizer"), dense, experts, strict=True):
        expected = of_dense * own.dense.item() + of_experts * own.experts.item()
        assert owners[name].item() == pytest.approx(expected), name


def test_parameters_held_are_those_of_the_stage():
    """Dense: norms 2 x 10, qkv 24 x 10, projection 120, gate and up 140, down 70 = 590 a layer."""
    own = held(of(pp=2, gbs=2))
    assert np.broadcast_to(own.dense, (1, 2)).tolist() == [[590 + 1280, 590 + 10 + 1280]]
    assert np.broadcast_to(own.ends, (1, 2)).tolist() == [[1280, 1280]]
    assert np.broadcast_to(own.small, (1, 2)).tolist() == [[20, 30]]
    tied = held(of(shape(tied=True)))
    assert (tied.dense.item(), tied.ends.item()) == (2 * 590 + 10 + 1280, 1280)
    layer_norms = held(of(shape(norm="layer", positions=32)))
    assert layer_norms.ends.item() == 2 * 1280 + 32 * 10
    assert layer_norms.small.item() == 2 * 40 + 20


def fitting(of, needed, reserved):
    return [memory.FIT[code] for code in memory.classify(of, np.array(needed), np.array(reserved))]


def test_tensors_alone_decide_unless_the_run_has_a_cap():
    capped, free = job(DENSE, options=Options(memory_cap=3.0)), job(DENSE)
    assert memory.limit(capped) == 3 * GIB
    needed = np.array([1.0, 1.0, 1.0, 3.1])
    reserved = np.array([2.98, 2.99, 3.01, 3.2])  # half a percent of 3 is 0.015
    assert fitting(capped, needed * GIB, reserved * GIB) == ["fits", "tight", "does not fit", "does not fit"]
    share = memory.limit(free) / 3
    assert fitting(free, needed * share, reserved * share) == ["fits", "tight", "tight", "does not fit"]


def test_whole_columns_give_what_single_layouts_give():
    u = of(tp=2, pp=2, gbs=4)
    assert u.column("tp").shape[-1] == 1
    assert columns.from_job(u.job).tp.shape == u.c.tp.shape


# A layer of DENSE keeps 128 + 82 bytes a token; its backward pass takes 48 in attention and 34 in the MLP.
LAYER = ATTENTION + 82
TOKEN = 2 * 10
"""A layer's input."""


def flight_of(u):
    made = activations_in_flight(u)
    return [np.broadcast_to(part, u.c.rank.shape).ravel() / SEQ for part in (made.kept, made.recomputed, made.backward)]


@pytest.mark.parametrize(
    ("more", "kept", "recomputed", "backward"),
    [
        ({}, 2 * LAYER, 0, 34),
        ({"recompute": "full"}, 2 * TOKEN, LAYER, 34),
        ({"recompute": "full", "recompute_layers": 2}, TOKEN, 2 * LAYER, 34),
        ({"recompute": "full", "recompute_method": "block", "recompute_layers": 1}, TOKEN + LAYER, LAYER, 34),
        ({"recompute": "full", "recompute_method": "block", "recompute_layers": 2}, 2 * TOKEN, LAYER, 34),
        ({"recompute": "selective", "recompute_modules": ("mlp",)}, 2 * (ATTENTION + 20), 0, 62 + 34),
        # of torchtitan's selective recomputation, every second product is repeated: half is kept
        ({"recompute": "selective", "recompute_modules": ("core_attn",), "options": {"framework": "fsdp2"}},
         2 * (LAYER - 16) / 2, 0, 34),
    ],
)  # fmt: skip
def test_what_is_in_flight_on_one_rank(more, kept, recomputed, backward):
    assert [part.item() for part in flight_of(of(**more))] == pytest.approx([kept, recomputed, backward])


def test_micro_batches_in_flight():
    """1F1B: min(m, p - r); interleaved: 2 (p - r - 1) + (v - 1) p + 1 chunks of a v-th of a rank's layers."""
    deep = shape(layers=8)
    assert in_flight(of(deep, pp=4, gbs=8)).ravel().tolist() == [4, 3, 2, 1]
    assert in_flight(of(deep, pp=4, gbs=2)).ravel().tolist() == [2, 2, 2, 1]
    assert in_flight(of(deep, pp=4, gbs=8, options={"schedule": "gpipe"})).ravel().tolist() == [8, 8, 8, 8]
    chunks = [number / 2 for number in (2 * 3 + 4 + 1, 2 * 2 + 4 + 1, 2 * 1 + 4 + 1, 4 + 1)]
    assert in_flight(of(deep, pp=4, vp=2, gbs=8)).ravel().tolist() == chunks
    wide = [number / 2 for number in (2 * 3 + 6 + 1, 2 * 2 + 6 + 1, 2 * 1 + 6 + 1, 6 + 1)]
    options = {"microbatch_group": 6}
    assert in_flight(of(deep, pp=4, vp=2, gbs=12, options=options)).ravel().tolist() == wide
    kept, _, _ = flight_of(of(deep, pp=4, gbs=8))
    assert kept.tolist() == [4 * 2 * LAYER, 3 * 2 * LAYER, 2 * 2 * LAYER, 2 * LAYER]


def test_the_last_layers_mixer_may_need_more_than_its_feed_forward():
    """Scores of 16 keys for 4 heads: 48 + 128 bytes of gradients, when the MLP's 82 bytes are free already."""
    _, _, backward = flight_of(of(shape(heads=40, kv_heads=40, ffn=7), options={"attention": "unfused"}))
    q = 120
    assert backward.item() == pytest.approx(2 * 3 * q + 2 * 16 * 40 - 82)


def test_multi_token_prediction_is_kept_on_the_last_rank():
    """A layer, both inputs' norms, their projection of two inputs, and a final norm: 4 x 2 and 2 x 2 and 2 x 2."""
    kept, _, _ = flight_of(of(shape(layers=2, mtp_layers=1), pp=2, gbs=2))
    assert kept.tolist() == [2 * LAYER, LAYER + LAYER + 10 * (4 + 4 + 4 + 4)]


def test_cuda_graphs_of_the_attention_stay_theirs():
    u = of(pp=1, options={"cuda_graphs": True})
    made = activations_in_flight(u)
    assert np.ravel(made.graphs.kept).item() == 2 * ATTENTION * SEQ
    assert np.ravel(made.graphs.backward).item() == 48 * SEQ
    assert np.ravel(made.graphs.static).item() == 2 * 4 * TOKEN * SEQ  # inputs, outputs and their gradients
    assert np.ravel(made.kept).item() == 2 * 82 * SEQ
    assert np.ravel(made.backward).item() == 34 * SEQ


def test_owners_at_the_peak_of_each_moment():
    """Logits of 128 columns are 10 bytes each: 1,280 a token, far more than a layer's backward pass."""
    u = of()
    moment = peak.peak_moment(u)
    assert np.ravel(moment.owners["logits"]).item() == 1280 * SEQ
    assert np.ravel(moment.owners["activations"]).item() == 2 * LAYER * SEQ
    assert np.ravel(moment.owners["transient"]).item() == 3 * TOKEN * SEQ
    assert np.ravel(moment.set_aside).item() == 0
    staged = peak.peak_moment(of(pp=2, gbs=2)).owners
    assert np.ravel(staged["logits"]).tolist() == [0, 1280 * SEQ]
    assert np.ravel(staged["transient"]).tolist() == [(34 + TOKEN) * SEQ, 3 * TOKEN * SEQ]


@pytest.mark.parametrize(("precision", "grads", "size"), [("bf16", "fp32", 4), ("bf16", "bf16", 2), ("fp32", "bf16", 4),
                                                          ("fp16", "fp32", 2)])  # fmt: skip
def test_bytes_of_a_main_gradient(precision, grads, size):
    assert model_states.gradient_bytes(of(precision=precision, options={"grads": grads})) == size
