"""Each rule of a layout, a model and a job: a job that breaks it, and the nearest one that does not."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superpod.planner import hardware, legality
from superpod.planner.layout import Layout
from superpod.planner.models import ModelShape
from superpod.planner.planned_job import Options, PlannedJob
from superpod.planner.rules.rules import near_divisors, near_multiples


def shape(**more: Any) -> ModelShape:
    sizes = {"layers": 8, "hidden": 64, "heads": 8, "kv_heads": 4, "ffn": 96, "vocab": 128, "head_dim": 8}
    return ModelShape(**{"name": "m", **sizes, **more})


def mamba(heads, groups):
    more = {"layers": 2, "pattern": "M-", "mamba_head_dim": 8, "mamba_state": 8}
    return shape(mamba_heads=heads, mamba_groups=groups, **more)


DENSE = shape()
MOE = shape(experts=8, topk=2, expert_ffn=48, shared_ffn=32)
MLA = shape(kv_lora=16, qk_nope_dim=8, qk_rope_dim=8, v_dim=8)
HYBRID = shape(pattern="M-M-M-M-", mamba_heads=8, mamba_head_dim=8, mamba_groups=4, mamba_state=8)
DELTA = shape(delta_every=2, delta_key_heads=4, delta_value_heads=8, delta_key_dim=8, delta_value_dim=8)
SELECTIVE = {"recompute": "selective"}


def broken(
    model=DENSE, *, gpus=8, seq=256, precision="bf16", gpu="h100", options=None, task: Any = "pretrain", **layout
):
    node = hardware.node(gpu)
    made = PlannedJob(
        model, node, hardware.builtin().fabric_of(node), gpus, seq, precision, Layout(**{"gbs": 64, **layout}),
        task=task, options=Options(**options or {}),
    )  # fmt: skip
    return {violation.rule: violation for violation in legality.violations(made)}


CASES = [  # rule, model, what breaks it, what does not
    ("sp", DENSE, {"sp": True}, {"sp": True, "tp": 2}),
    ("vp", DENSE, {"vp": 2}, {"vp": 2, "pp": 2}),
    ("vp_of_one", DENSE, {"vp": 1, "pp": 2}, {"vp": 2, "pp": 2}),
    ("world", DENSE, {"tp": 3}, {"tp": 4}),
    ("world", DENSE, {"cp": 3}, {"cp": 2}),
    ("gbs", DENSE, {"gbs": 60}, {"gbs": 56}),
    ("gbs", DENSE, {"mbs": 3}, {"mbs": 2}),
    ("micro_batches", DENSE, {"vp": 2, "pp": 4, "gbs": 10}, {"vp": 2, "pp": 4, "gbs": 16}),
    ("micro_batches", DENSE, {"vp": 2, "pp": 4, "gbs": 10}, {"pp": 4, "gbs": 10}),
    ("expert_grid", MOE, {"ep": 16}, {"ep": 8}),
    ("expert_grid", MOE, {"ep": 8, "tp": 2, "etp": 2, "sp": True}, {"ep": 4, "tp": 2, "etp": 2, "sp": True}),
    ("heads", shape(heads=6, kv_heads=6), {"tp": 4}, {"tp": 2}),
    ("kv_heads", DENSE, {"tp": 8}, {"tp": 4}),
    ("ffn", shape(ffn=98), {"tp": 4}, {"tp": 2}),
    ("expert_ffn", shape(experts=8, topk=2, expert_ffn=50), {"tp": 4, "etp": 4, "sp": True}, {"tp": 4, "etp": 2}),
    ("shared_ffn", shape(experts=8, topk=2, expert_ffn=48, shared_ffn=34), {"tp": 4}, {"tp": 2}),
    ("vocab", shape(vocab=130, vocab_divisible_by=1), {"tp": 4}, {"tp": 2}),
    ("hidden", shape(hidden=66, mtp_layers=1), {"tp": 4}, {"tp": 2}),
    ("experts", shape(experts=6, topk=2, expert_ffn=48), {"ep": 4}, {"ep": 2}),
    ("mamba_heads", mamba(6, 4), {"tp": 4}, {"tp": 2}),
    ("mamba_groups", mamba(8, 2), {"tp": 4}, {"tp": 2}),
    ("delta_key_heads", DELTA, {"tp": 8}, {"tp": 4}),
    ("hybrid_stages", HYBRID, {"pp": 2, "vp": 2}, {"pp": 2}),
    ("no_experts", DENSE, {"ep": 2}, {"ep": 1}),
    ("expert_bias", shape(experts=8, topk=2, expert_ffn=48, bias=True), {"tp": 2, "etp": 2}, {"tp": 2, "etp": 1}),
    ("precision", DENSE, {"precision": "mxfp8"}, {"precision": "mxfp8", "gpu": "b200"}),
    ("precision", DENSE, {"precision": "fp8", "gpu": "a100"}, {"precision": "fp8"}),
    ("memory_cap", DENSE, {"options": {"memory_cap": 81.0}}, {"options": {"memory_cap": 70.0}}),
    ("seq_cp", DENSE, {"cp": 2, "seq": 258}, {"cp": 2, "seq": 260}),
    ("seq_cp", DENSE, {"cp": 2, "seq": 257}, {"seq": 257}),
    ("seq_tp", DENSE, {"tp": 2, "cp": 2, "sp": True, "seq": 258}, {"tp": 2, "cp": 2, "seq": 258}),
    ("seq_tp", DENSE, {"tp": 2, "cp": 2, "sp": True, "seq": 258}, {"tp": 2, "cp": 2, "sp": True, "seq": 260}),
    ("experts_sp", MOE, {"tp": 2}, {"tp": 2, "sp": True}),
    ("experts_sp", MOE, {"tp": 2, "ep": 2}, {"ep": 2}),
    ("cp_attention", DENSE, {"cp": 2, "options": {"attention": "unfused"}}, {"options": {"attention": "unfused"}}),
    ("cp_attention", DENSE, {"cp": 2, "options": {"impl": "local"}}, {"cp": 2}),
    ("cp_attention", DENSE, {"cp": 2, "options": {"attention": "local"}}, {"cp": 2, "options": {"attention": "fused"}}),
    ("vp_p2p", DENSE, {"pp": 2, "vp": 2, "options": {"overlap_p2p": False}}, {"pp": 2, "vp": 2}),
    ("vp_p2p", DENSE, {"pp": 2, "vp": 2, "options": {"overlap_p2p": False}},
     {"pp": 4, "vp": 2, "options": {"overlap_p2p": False}}),
    ("recompute_groups", DENSE, {"recompute": "full", "recompute_layers": 3},
     {"recompute": "full", "recompute_layers": 4}),
    ("recompute_groups", DENSE, {"recompute": "full", "recompute_layers": 3},
     {"recompute": "full", "recompute_layers": 3, "recompute_method": "block"}),
    ("recompute_mtp", shape(mtp_layers=1), {"recompute": "full", "recompute_layers": 2},
     {"recompute": "full", "recompute_layers": 1}),
    ("recompute_mtp", shape(mtp_layers=1), {"recompute": "full", "recompute_layers": 2},
     {"recompute": "full", "recompute_layers": 2, "recompute_method": "block"}),
    ("mla_attention", MLA, {"options": {"attention": "local"}}, {"options": {"attention": "unfused"}}),
    ("mla_attention", MLA, {"options": {"impl": "local"}}, {}),
    ("recompute_mla", DENSE, {**SELECTIVE, "recompute_modules": ("mla_up_proj",)},
     {**SELECTIVE, "recompute_modules": ("mlp",)}),
    ("recompute_experts", DENSE, {**SELECTIVE, "recompute_modules": ("moe_act",)},
     {**SELECTIVE, "recompute_modules": ("core_attn",)}),
    ("recompute_delayed", DENSE, {**SELECTIVE, "recompute_modules": ("layernorm",), "precision": "fp8ds"},
     {**SELECTIVE, "recompute_modules": ("layernorm",), "precision": "fp8cs"}),
    ("recompute_delayed", MOE, {**SELECTIVE, "recompute_modules": ("moe_act",), "precision": "fp8ds"},
     {**SELECTIVE, "recompute_modules": ("mlp",), "precision": "fp8ds"}),
    ("recompute_graphs", DENSE, {"recompute": "full", "options": {"cuda_graphs": True}}, {"recompute": "full"}),
    ("recompute_graphs", DENSE, {"recompute": "full", "options": {"cuda_graphs": True}},
     {"recompute": "selective", "options": {"cuda_graphs": True}}),
    ("overlap_experts", MOE, {"options": {"overlap_experts": True}}, {"ep": 2, "options": {"overlap_experts": True}}),
    ("overlap_experts", MOE, {"ep": 2, "pp": 2, "options": {"overlap_experts": True}},
     {"ep": 2, "pp": 2, "vp": 2, "options": {"overlap_experts": True}}),
    ("overlap_experts", MOE, {"ep": 2, "recompute": "full", "options": {"overlap_experts": True}}, {"ep": 2}),
    ("overlap_experts", MOE, {"ep": 2, "precision": "fp32", "options": {"overlap_experts": True}},
     {"ep": 2, "precision": "fp16", "options": {"overlap_experts": True}}),
    ("overlap_experts", shape(experts=8, topk=2, expert_ffn=48, mtp_layers=2),
     {"ep": 2, "options": {"overlap_experts": True}}, {"ep": 2}),
    ("fp8_params", DENSE, {"options": {"fp8_params": True}}, {"precision": "fp8cs", "options": {"fp8_params": True}}),
    ("moments", DENSE, {"sharding": "none", "options": {"moments": "bf16"}}, {"options": {"moments": "bf16"}}),
    ("moments", DENSE, {"sharding": "none", "options": {"moments": "bf16"}}, {"sharding": "none"}),
    ("zero2_overlap", DENSE, {"sharding": "zero2", "options": {"overlap_grads": False}}, {"sharding": "zero2"}),
    ("zero2_overlap", DENSE, {"sharding": "zero2", "options": {"overlap_grads": False}},
     {"sharding": "zero3", "options": {"overlap_grads": False}}),
    ("mamba_cp", HYBRID, {"cp": 8, "tp": 2, "gpus": 16}, {"cp": 8}),  # 8 heads / (2 x 8)
    ("mamba_cp", mamba(12, 4), {"cp": 3, "gpus": 24},
     {"cp": 2}),  # neither of 3 and 4 divides the other
    ("fsdp_experts", MOE, {"ep": 2, "sharding": "zero2"}, {"ep": 2}),
    ("fsdp_experts", MOE, {"ep": 2, "sharding": "zero2"}, {"sharding": "zero2"}),
    ("fsdp_pipeline", DENSE, {"pp": 2, "sharding": "zero2"}, {"sharding": "zero2"}),
    ("fsdp_pipeline", DENSE, {"pp": 2, "sharding": "zero3"}, {"pp": 2}),
    ("both_ends_vp", DENSE, {"pp": 2, "vp": 2, "first_layers": 4, "last_layers": 4}, {"pp": 2, "vp": 2}),
    ("recompute_mtp_block", shape(mtp_layers=1), {"recompute": "full", "recompute_method": "block"},
     {"recompute": "full"}),
    ("adapters_vp", DENSE, {"task": "lora", "pp": 2, "vp": 2}, {"task": "sft", "pp": 2, "vp": 2}),
    ("recompute_frozen", DENSE, {"task": "lora", "recompute": "full"}, {"task": "sft", "recompute": "full"}),
    ("recompute_frozen", DENSE, {"task": "lora", "recompute": "full"}, {"task": "lora", **SELECTIVE}),
    ("recompute_frozen_norm", MLA, {"task": "lora", **SELECTIVE, "recompute_modules": ("layernorm",)},
     {"task": "lora", **SELECTIVE, "recompute_modules": ("core_attn",)}),
    ("recompute_frozen_norm", MLA, {"task": "lora", **SELECTIVE, "recompute_modules": ("layernorm",)},
     {"task": "sft", **SELECTIVE, "recompute_modules": ("layernorm",)}),
    ("attention_heads", DENSE, {"cp": 8, "options": {"cp_comm": "a2a"}}, {"cp": 4, "options": {"cp_comm": "a2a"}}),
    ("attention_heads", DENSE, {"cp": 4, "tp": 2, "options": {"cp_comm": "a2a"}}, {"cp": 4, "tp": 2}),
    # FP8 multiplies in steps of 16 tokens of a rank, and of 16 rows and columns of a weight
    ("fp8_tokens", DENSE, {"precision": "fp8cs", "seq": 264}, {"precision": "fp8cs", "seq": 272}),
    ("fp8_tokens", DENSE, {"precision": "fp8cs", "seq": 272, "cp": 2}, {"precision": "fp8cs", "seq": 288, "cp": 2}),
    ("fp8_tokens", DENSE, {"precision": "fp8cs", "seq": 264}, {"precision": "fp8cs", "seq": 264, "mbs": 2}),
    ("fp8_weights", shape(ffn=100), {"precision": "fp8cs"}, {}),
    ("fp8_weights", shape(ffn=100), {"precision": "fp8cs"}, {"precision": "fp8cs", "options": {"impl": "local"}}),
    ("ub_mxfp8", DENSE, {"gpu": "b200", "precision": "mxfp8", "tp": 2, "sp": True, "seq": 320},
     {"gpu": "b200", "precision": "mxfp8", "tp": 2, "sp": True, "seq": 512}),
    ("ub_mxfp8", DENSE, {"gpu": "b200", "precision": "mxfp8", "tp": 2, "sp": True, "seq": 320},
     {"gpu": "b200", "precision": "mxfp8", "tp": 2, "sp": True, "seq": 320, "options": {"overlap_tp": False}}),
    ("mxfp8_sizes", shape(hidden=72),
     {"gpu": "b200", "precision": "mxfp8", "options": {"fp8_params": True}}, {"gpu": "b200", "precision": "mxfp8"}),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "model", "wrong", "right"), CASES)
def test_a_rule_is_broken_here_and_not_there(rule, model, wrong, right):
    assert rule in broken(model, **wrong)
    assert rule not in broken(model, **right)


@pytest.mark.parametrize(
    ("wrong", "rule", "fix"),
    [
        ({"gbs": 60}, "gbs", "nearest: gbs 56 or 64"),
        ({"vp": 2, "pp": 4, "gbs": 10}, "micro_batches", "set gbs 8"),
        ({"model": MOE, "ep": 16}, "expert_grid", "set ep to a divisor of 8"),
        ({"model": MOE, "ep": 8, "tp": 2, "etp": 2, "sp": True}, "expert_grid", "set ep to a divisor of 4"),
        ({"tp": 2, "cp": 2, "sp": True, "seq": 258}, "seq_tp", "nearest: seq 256 or 260, or disable sp"),
        ({"cp": 2, "seq": 258}, "seq_cp", "nearest: seq 256 or 260"),
        ({"model": shape(heads=6, kv_heads=6), "tp": 4}, "heads", "nearest: tp 3 or 6"),
        (
            {"model": shape(ffn=100), "precision": "fp8cs"},
            "fp8_weights",
            "set precision bf16, or a different FP8 precision",
        ),
        ({"model": shape(ffn=100), "precision": "fp8cs", "tp": 2}, "fp8_weights", "reduce tp"),
        ({"precision": "fp8cs", "seq": 260}, "fp8_tokens", "nearest: seq 256 or 272 / mbs, or reduce tp or cp"),
        ({"cp": 8, "options": {"cp_comm": "a2a"}}, "attention_heads", "set cp to a divisor of 4"),
    ],
)
def test_the_nearest_change(wrong, rule, fix):
    assert broken(**wrong)[rule].fix == fix


@given(step=st.integers(1, 50), value=st.integers(1, 5000))
def test_nearest_multiples_stand_on_both_sides(step, value):
    near = [int(word) for word in near_multiples(step, value).split(" or ")]
    assert all(number > 0 and number % step == 0 for number in near)
    assert min(near) <= max(value, step)
    assert max(near) > value
    assert max(near) - min(near) in (0, step)


@given(size=st.integers(1, 3000), wanted=st.integers(1, 800))
def test_nearest_divisors_have_none_between_them(size, wanted):
    near = [int(word) for word in near_divisors(size, wanted).split(" or ")]
    assert all(size % number == 0 for number in near)
    below = max(d for d in range(1, wanted + 1) if size % d == 0)
    above = [d for d in range(wanted + 1, 4 * wanted + 1) if size % d == 0][:1]
    assert near == [below, *above]
