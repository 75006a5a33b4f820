"""Step time: what must hold of any calibration. How near it comes to published runs: test_accuracy.py."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superpod.planner import columns, hardware, models
from superpod.planner.calibration import calibration, releases
from superpod.planner.columns import Stages
from superpod.planner.layout import Layout
from superpod.planner.models import Split
from superpod.planner.planned_job import Options, PlannedJob
from superpod.planner.timing import steptime


def make(
    model="llama3_70b", node="h100", gpus=64, precision="bf16", seq=8192, task: Any = "pretrain", options=None, **layout
):
    given = {"tp": 4, "pp": 4, "vp": 5, "sp": True, "gbs": 128, **layout}
    given["sp"] = given["sp"] and given["tp"] > 1
    place = hardware.node(node)
    fabric = hardware.builtin().fabric_of(place)
    own = Options(**(options or {}))
    shape = models.find(model)
    return PlannedJob(shape, place, fabric, gpus, seq, precision, Layout(**given), task=task, options=own)


def seconds(job):
    return float(steptime.step(job, columns.from_job(job)).seconds)


def terms(job):
    return {key: float(part) for key, part in steptime.step(job, columns.from_job(job)).terms.items()}


JOBS = [
    make(),
    make(cp=2, tp=2, precision="fp8cs"),
    make("llama31_405b", "gb200", 256, "nvfp4", pp=16, vp=8, gbs=1536, embedding_as_layer=True, loss_as_layer=True),
    make("qwen3_30b_a3b", "h100", 16, "bf16", 4096, tp=1, pp=1, vp=None, ep=8, etp=1, gbs=256),
    make("deepseek_v3", "gb300", 256, "mxfp8", 4096, tp=1, vp=None, ep=32, etp=1, gbs=2048, chunks=(16, 15, 15, 15)),
    make("nemotron3_nano", "b200", 8, "mxfp8", 8192, tp=1, pp=1, vp=None, ep=8, etp=1, gbs=64),
    make(recompute="full"),
    make(tp=1, pp=1, vp=None, sharding="zero3"),
    make(task="lora", precision="fp8cs"),
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.model.name}-{job.layout.short()}-{job.precision}")
def test_terms_are_non_negative_and_add_up(job):
    step = steptime.step(job, columns.from_job(job))
    assert set(step.terms) == set(steptime.TERMS)
    assert all(float(part) >= 0 for part in step.terms.values())
    assert sum(map(float, step.terms.values())) == pytest.approx(float(step.seconds), rel=1e-12)
    assert 0.03 < float(steptime.mfu(job, float(step.seconds))) < 0.9


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.model.name}-{job.layout.short()}-{job.precision}")
def test_time_never_falls_with_slower_links(job):
    slow = job.replace(
        node=job.node.replace(gpu=job.node.gpu.replace(nvlink_gb_per_s=job.node.gpu.nvlink_gb_per_s / 3))
    )
    far = job.replace(fabric=job.fabric.replace(gbps=job.fabric.gbps / 3))
    assert seconds(slow) >= seconds(job)
    assert seconds(far) >= seconds(job)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.model.name}-{job.layout.short()}-{job.precision}")
def test_slower_chips_take_longer(job):
    gpu = job.node.gpu
    for key in ("hbm_tb_per_s", "bf16_tflops", "fp8_tflops", "nvfp4_tflops"):
        slow = job.replace(node=job.node.replace(gpu=gpu.replace(**{key: getattr(gpu, key) / 2})))
        used = key in ("hbm_tb_per_s", "bf16_tflops") or (key == "nvfp4_tflops") == (job.precision == "nvfp4")
        low = job.precision not in ("bf16", "fp16")
        assert seconds(slow) >= seconds(job)
        if used and (low or key in ("hbm_tb_per_s", "bf16_tflops")):
            assert seconds(slow) > seconds(job)


def test_tensor_parallelism_between_nodes_is_slower_than_inside():
    inside = make(tp=8, pp=4, vp=5)
    assert terms(inside.replace(node=inside.node.replace(nvlink_domain=4)))["tp"] > 3 * terms(inside)["tp"]


def test_more_work_takes_longer():
    base = make()
    assert seconds(make(seq=16384)) > 2 * seconds(base)  # attention grows with the square
    assert seconds(make(gbs=256)) > 1.8 * seconds(base)
    assert seconds(base.replace(model=base.model.replace(ffn=2 * base.model.ffn))) > 1.3 * seconds(base)
    assert seconds(base.replace(model=base.model.replace(layers=160))) > 1.8 * seconds(base)


def test_recomputation_repeats_the_forward_pass():
    plain, full = terms(make()), terms(make(recompute="full"))
    assert plain["recompute"] == 0
    assert 0.2 * plain["compute"] < full["recompute"] < 0.45 * plain["compute"]
    part = terms(make(recompute="full", recompute_method="block", recompute_layers=1))
    assert part["recompute"] == pytest.approx(full["recompute"] / 4)  # one of each chunk's four layers
    some = terms(make(recompute="selective", recompute_modules=("core_attn",)))
    assert 0 < some["recompute"] < part["recompute"]
    assert terms(make(recompute="selective", recompute_modules=("layernorm",)))["recompute"] == 0  # in the next product


def test_an_odd_vocabulary_slows_its_product_and_padding_mends_it():
    def head(vocab, divisible_by):
        own = models.find("llama3_8b").replace(layers=1, vocab=vocab, vocab_divisible_by=divisible_by)
        job = make("llama3_8b", gpus=1, tp=1, pp=1, vp=None, gbs=1).replace(model=own)
        return terms(job)["compute"]

    whole, even, odd = head(50264, 1), head(50260, 1), head(50257, 1)
    assert 1.05 * whole < even < odd / 1.1
    assert head(50257, 128) == pytest.approx(whole, rel=0.01)


def test_frozen_weights_have_no_gradients():
    full, lora = terms(make(precision="bf16")), terms(make(precision="bf16", task="lora"))
    assert lora["compute"] < 0.8 * full["compute"]
    assert lora["dp"] < 0.2 * full["dp"] + 1e-9
    assert lora["optimizer"] < 0.2 * full["optimizer"]


def test_interleaving_divides_the_bubble():
    deep = {vp: terms(make(vp=vp))["pp_bubble"] for vp in (None, 5, 20)}
    assert deep[5] == pytest.approx(deep[None] / 5, rel=0.1)
    assert deep[20] < deep[5]
    assert terms(make(pp=1, vp=None, tp=8))["pp_bubble"] == 0


def test_hiding_communication_helps():
    for key, term in {
        "overlap_tp": "tp",
        "overlap_grads": "dp",
        "overlap_params": "dp",
        "overlap_p2p": "pp_p2p",
    }.items():
        shown, hidden = make(options={key: False}), make(options={key: True})
        assert terms(shown)[term] > terms(hidden)[term]
        assert seconds(shown) > seconds(hidden)


def test_cuda_graphs_take_launches_off_a_small_model():
    small: dict[str, Any] = dict(model="llama3_8b", gpus=8, tp=8, pp=1, vp=None, seq=512, gbs=64)
    eager, graphed = make(**small), make(**small, options={"cuda_graphs": True})
    assert terms(eager)["overhead"] > 1.5 * terms(graphed)["overhead"]
    assert terms(eager)["compute"] > 1.02 * terms(graphed)["compute"]  # with the gaps between kernels


def test_optimizer_shards_with_data_parallelism():
    whole, shared = make(sharding="none"), make(sharding="zero1")
    assert terms(whole)["optimizer"] > 1.5 * terms(shared)["optimizer"]


def test_busy_experts_hold_up_the_rest():
    even: dict[str, Any] = dict(model="qwen3_30b_a3b", gpus=16, seq=4096, tp=1, pp=1, vp=None, ep=8, etp=1, gbs=256)
    assert seconds(make(**even, options={"imbalance": 1.3})) > seconds(make(**even))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_many_layouts_at_once_give_what_each_gives_alone(data):
    draw = data.draw
    jobs = []
    for _ in range(6):
        tp, pp, cp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4)))
        vp = draw(st.sampled_from((None, 2, 5))) if pp > 1 else None
        layout = Layout(
            tp=tp, pp=pp, cp=cp, vp=vp, sp=tp > 1, mbs=draw(st.sampled_from((1, 2))), gbs=256,
            recompute=draw(st.sampled_from(("none", "selective", "full"))),
            sharding=draw(st.sampled_from(("none", "zero1", "zero3"))),
        )  # fmt: skip
        jobs.append(make(gpus=256).replace(layout=layout))
    splits = list({Split(pp=job.layout.pp, vp=job.layout.vp or 1): None for job in jobs})
    way = np.array([splits.index(Split(pp=job.layout.pp, vp=job.layout.vp or 1)) for job in jobs])
    values = columns.fields([job.layout for job in jobs], [256] * len(jobs))
    together = steptime.step(jobs[0], Stages(jobs[0].model, splits).columns(way, values))
    for i, job in enumerate(jobs):
        alone = steptime.step(job, columns.from_job(job))
        assert together.seconds[i] == pytest.approx(float(alone.seconds), rel=1e-9)
        for key in steptime.TERMS:
            assert together.terms[key][i] == pytest.approx(float(alone.terms[key]), rel=1e-9, abs=1e-12)


def test_utilization_counts_what_it_says():
    job = make()
    assert steptime.tokens_per_s_per_gpu(job, 8.0) == pytest.approx(128 * 8192 / 8 / 64)
    flops = job.model.flops_per_token(8192, causal=True) * 128 * 8192
    assert steptime.mfu(job, 8.0) == pytest.approx(flops / 8 / 64 / 989.4e12)
    assert steptime.hfu(job, 8.0) == pytest.approx(steptime.mfu(job, 8.0))
    full = make(recompute="full")
    assert 1.28 < steptime.hfu(full, 8.0) / steptime.mfu(full, 8.0) < 1.34


def test_a_release_selects_the_factor_of_its_group():
    groups = {"NeMo 24.07": "NeMo 24", "tag v25.04.02": "NeMo 25.0", "NeMo 25.09": "NeMo 25.1", "": "NeMo 25.1"}
    groups |= {"NeMo 26.04.01": "NeMo 26.0", "verification card; container 26.06": "NeMo 26.1"}
    for release, group in groups.items():
        job = make(options={"release": releases.normalize(release)})
        assert f"software {group}" in calibration.selectors(job)
    assert "software deepspeed" in calibration.selectors(make(options={"framework": "deepspeed"}))


def test_every_gpu_has_every_constant():
    known = set(calibration.constants(make()))
    for node in hardware.builtin().nodes:
        job = make().replace(node=hardware.node(node))
        constants = calibration.constants(job)
        assert set(constants) == known
        assert all(np.isfinite(value) and value > 0 for value in constants.values())


def test_a_gpu_without_a_file_is_costed():
    job = make("llama3_8b", "l40s", 8, "bf16", 4096, tp=1, pp=2, vp=None, gbs=16)
    assert 0.02 < steptime.mfu(job, seconds(job)) < 0.9


def test_zero_2_reduces_gradients_for_every_micro_batch():
    shape: dict[str, Any] = dict(pp=1, vp=None, tp=4, gbs=512)
    once, per_micro_batch = (terms(make(**shape, sharding=how))["dp"] for how in ("zero1", "zero2"))
    assert per_micro_batch > 2 * once


def test_the_optimizer_in_host_memory_takes_its_time():
    here, there = make(), make(options={"offload": 1.0})
    assert terms(there)["optimizer"] > 3 * terms(here)["optimizer"]
    assert seconds(there) > seconds(here)


def test_lora_under_zero_3_gathers_what_is_frozen_too():
    shape: dict[str, Any] = dict(gpus=8, tp=1, pp=1, vp=None, gbs=8, task="lora")
    whole, sharded = (terms(make(**shape, sharding=how))["dp"] for how in ("zero1", "zero3"))
    assert sharded > 20 * whole
