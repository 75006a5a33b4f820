"""Nothing is predicted to be faster than the hardware, and a better GPU is never slower."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from superpod.planner import columns, hardware, models, predict
from superpod.planner.calibration import calibration
from superpod.planner.hardware import Node
from superpod.planner.layout import Layout
from superpod.planner.models import ModelShape
from superpod.planner.planned_job import Options, PlannedJob
from superpod.planner.timing import steptime

FACTS = hardware.builtin()
NODES = [FACTS.node(name) for name in FACTS.nodes]
LAYOUTS = (
    Layout(tp=1, pp=1, mbs=1, gbs=128),
    Layout(tp=4, pp=2, mbs=1, gbs=128, sp=True),
    Layout(tp=2, pp=1, cp=2, mbs=2, gbs=128, sp=True),
    Layout(tp=4, pp=2, mbs=4, gbs=512, sp=True, recompute="full", recompute_method="uniform", recompute_layers=1),
)
RELEASES = ("", "NeMo 24.07", "NeMo 25.04", "NeMo 26.02", "NeMo 26.06", "MLPerf v5.0", "MLPerf v5.1", "SC21")


def job(model: ModelShape, node: Node, precision: str, layout: Layout = LAYOUTS[0], **options: Any) -> PlannedJob:
    if model.is_moe:
        layout = layout.replace(ep=min(8, model.experts), etp=1)
    return PlannedJob(
        model=model, node=node, fabric=FACTS.fabric_of(node), gpus=64, seq=4096, precision=precision, layout=layout,
        options=Options(**options),
    )  # fmt: skip


def every_job_class() -> Iterator[PlannedJob]:
    """Yield a job for each combination of GPU, precision, release, task and dispatcher."""
    moe, dense = models.find("mixtral_8x7b"), models.find("llama3_8b")
    for node, release, model in itertools.product(NODES, RELEASES, (moe, dense)):
        for precision, task in itertools.product(node.gpu.precisions, ("pretrain", "sft", "lora")):
            fused = precision == "mxfp8"
            yield job(model, node, precision, release=release, fused_grouped_mlp=fused, deepep=model is moe).replace(
                task=task
            )


def below_bounds() -> list[str]:
    return [
        f"{name} {value:.2f} {one.node.name} {one.precision} {one.options.release}"
        for one in every_job_class()
        for name, value in calibration.constants(one).items()
        if value < calibration.BOUNDS.get(name, 0.0)
    ]


def inversions(jobs: Iterable[tuple[str, Layout, str, int]]) -> list[str]:
    """Return the pairs of GPUs of which the better one is predicted to be slower; (model, layout, precision, GPUs)."""
    found = []
    for name, layout, precision, gpus in jobs:
        nodes = [node for node in NODES if precision in node.gpu.precisions]
        alike = [job(models.find(name), node, precision, layout).replace(gpus=gpus, layout=layout) for node in nodes]
        seconds = [np.max(steptime.step(one, columns.from_job(one)).seconds) for one in alike]
        for (a, time_a), (b, time_b) in itertools.permutations(zip(nodes, seconds, strict=True), 2):
            if is_better(a, b) and time_a > 1.001 * time_b:
                found.append(f"{name} {precision} {layout.short()}: {a.name} {time_a:.3f} s, {b.name} {time_b:.3f} s")
    return found


def catalogue(names: Iterable[str]) -> Iterator[tuple[str, Layout, str, int]]:
    for name, layout, precision in itertools.product(names, LAYOUTS, ("bf16", "fp8cs", "mxfp8", "nvfp4")):
        model = models.find(name)
        if model.layers % layout.pp == 0:
            yield name, layout.replace(ep=min(8, model.experts), etp=1) if model.is_moe else layout, precision, 64


def drawn(seed: int, count: int) -> Iterator[tuple[str, Layout, str, int]]:
    """Yield jobs with random layouts, whether they fit or not."""
    rng = random.Random(seed)
    for _ in range(count):
        name = rng.choice(models.names())
        model = models.find(name)
        tp, pp, cp, dp = (rng.choice(sizes) for sizes in ((1, 2, 4, 8), (1, 1, 2, 4, 18), (1, 1, 2), (1, 2, 8, 16)))
        pp = pp if model.layers % pp == 0 else 1
        mbs, micro_batches = rng.choice((1, 1, 2, 4)), rng.choice((1, 2, 8)) * pp
        layout = Layout(tp=tp, pp=pp, cp=cp, mbs=mbs, gbs=mbs * micro_batches * dp, sp=tp > 1)
        if model.is_moe:
            ranks = math.gcd(model.experts, tp * cp * dp)
            layout = layout.replace(ep=rng.choice([ep for ep in (1, 2, 4, 8, 16, 32, 64) if ranks % ep == 0]), etp=1)
        if rng.random() < 0.3:
            layout = layout.replace(recompute="full", recompute_method="uniform", recompute_layers=1)
        if pp == 1 and rng.random() < 0.5:
            layout = layout.replace(sharding=rng.choice(("none", "zero3")))
        yield name, layout, rng.choice(("bf16", "fp8ds", "fp8cs", "mxfp8", "nvfp4")), tp * pp * cp * dp


def is_better(a: Node, b: Node) -> bool:
    """Whether node `a` is at least as good as `b` in every respect that the time model knows."""
    return all(x >= y for x, y in zip(abilities(a), abilities(b), strict=True)) and abilities(a) != abilities(b)


def abilities(node: Node) -> tuple[float, ...]:
    gpu, fabric = node.gpu, FACTS.fabric_of(node)
    peaks = (gpu.bf16_tflops, gpu.fp8_tflops, gpu.nvfp4_tflops, gpu.hbm_tb_per_s, gpu.nvlink_gb_per_s, gpu.power_w)
    return (*peaks, node.nvlink_domain, fabric.gb_per_s_per_gpu(node), -fabric.latency_us)


def test_no_kernel_and_no_link_is_faster_than_measured_or_nominal():
    assert below_bounds() == []


def test_no_factor_gets_below_a_bound(monkeypatch):
    tables = calibration._tables()
    planted = {**tables, "factors": {**tables["factors"], "precision bf16": {"matmul": 0.1, "ep_near": 0.1}}}
    monkeypatch.setattr(calibration, "_tables", lambda: planted)
    calibration._product.cache_clear()
    try:
        assert below_bounds() == []
    finally:
        calibration._product.cache_clear()


def test_no_users_correction_gets_below_a_bound():
    node = NODES[2]
    corrected = node.replace(gpu=node.gpu.replace(calibrated_as=f"{node.gpu.name}?general=0.1&near_bandwidth=50"))
    constants = calibration.constants(job(models.find("llama3_8b"), corrected, "bf16"))
    assert constants["matmul"] == constants["tp_near"] == 1.0


@pytest.mark.slow
def test_a_better_gpu_is_never_slower():
    assert inversions(catalogue(models.names())) == []


@pytest.mark.slow
def test_a_better_gpu_is_never_slower_in_random_layouts():
    assert inversions(drawn(seed=2, count=1000)) == []


def test_a_better_gpu_is_never_slower_for_some_models():
    names = ("tiny_llama3", "llama3_8b", "mixtral_8x7b", "nemotron3_nano", "deepseek_v2_lite")
    assert inversions(catalogue(names)) == []
    assert inversions(drawn(seed=1, count=40)) == []


def test_h200_is_not_slower_than_h100_for_405b():
    layout = Layout(tp=4, pp=18, mbs=4, gbs=1152, sp=True, recompute="full", recompute_method="uniform")
    assert inversions([("llama31_405b", layout.replace(recompute_layers=1), "bf16", 576)]) == []


def test_a_planted_slow_generation_is_an_inversion(monkeypatch):
    tables = calibration._tables()
    planted = {**tables, "factors": {**tables["factors"], "generation blackwell": {"software": 4.0}}}
    monkeypatch.setattr(calibration, "_tables", lambda: planted)
    calibration._product.cache_clear()
    try:
        assert any("b200" in line for line in inversions(catalogue(["mixtral_8x7b"])))
    finally:
        calibration._product.cache_clear()


@pytest.mark.slow
def test_no_run_uses_more_of_the_peak_than_its_kernels_do():
    jobs = [
        job(models.find(name), node, precision, layout)
        for name, node, layout in itertools.product(models.names(), NODES, LAYOUTS)
        for precision in node.gpu.precisions
        if precision not in ("fp32", "tf32")
    ]
    assert max(prediction.mfu or 0.0 for prediction in predict.many(jobs)) < 0.85
