"""Worked examples as published, by this planner's own functions; where one is wrong, the test says why."""

from dataclasses import replace

import numpy as np
import pytest

from superpod.errors import UserError
from superpod.planner import columns, memory
from superpod.planner.models import ModelShape
from superpod.planner.rules import textbook
from superpod.planner.timing import collectives, schedule
from superpod.planner.timing.collectives import Links

GB, GIB = 1e9, 2**30
NVLINK = Links(near_bytes_per_s=450 * GB, far_bytes_per_s=50 * GB)
"""H100: NVLink 900 GB/s both ways, a 400 Gb/s port a GPU; latencies left out, as the examples do."""


def bubble(p, m, v=1):
    """Of the whole step, with equal stages of a second each."""
    idle = float(schedule.bubble_seconds(np.ones((1, p)), np.ones((1, p)), np.array([v]))[0])
    return idle / (m + idle)


def test_sixteen_stages_and_32_micro_batches_are_68_percent_efficient():
    assert 1 - bubble(16, 32) == pytest.approx(32 / (32 + 15))
    assert round(100 * (1 - bubble(16, 32))) == 68


@pytest.mark.parametrize(
    ("m", "v", "percent"),
    [(1, 1, 75.0), (4, 1, 42.9), (8, 1, 27.3), (16, 1, 15.8), (32, 1, 8.6), (8, 2, 15.8), (8, 4, 8.6)],
)
def test_the_bubble_table_for_four_stages(m, v, percent):
    assert 100 * bubble(4, m, v) == pytest.approx(percent, abs=0.05)


def test_attention_without_flash_keeps_17_gb_a_layer(run):
    """seq 8192, 32 heads, batch 4, two bytes a score: 17 GB for one copy; Megatron's unfused attention keeps more."""
    one_copy = 4 * 32 * 8192**2 * 2
    assert one_copy == pytest.approx(17.2 * GB, rel=0.01)
    model = ModelShape.from_shape(style="gpt", layers=8, hidden=4096, heads=32, vocab=32000)
    job = run(model, gpus=1, gbs=4, mbs=4)
    kept = []
    for attention in ("flash", "unfused"):
        made = job.replace(options=replace(job.options, attention=attention))
        kept.append(float(memory.by_owner(made, columns.from_job(made))["activations"][0]))
    assert (kept[1] - kept[0]) / 8 >= one_copy * 0.99


def test_a_ring_all_reduces_175b_gradients_at_25_gb_per_s_in_56_s():
    """The limit of many ranks: 2 x 700 GB / 25 GB/s; 8 ranks move 7/8 of it."""
    slow = Links(near_bytes_per_s=25 * GB, far_bytes_per_s=25 * GB)
    many = collectives.seconds("all_reduce", 175e9 * 4, 4096, 4096, slow)
    assert many == pytest.approx(56, rel=1e-3)
    assert collectives.seconds("all_reduce", 175e9 * 4, 8, 8, slow) == pytest.approx(49)


def test_tensor_parallel_traffic_of_96_layers():
    """h 8192, batch 4, seq 2048: 134 MB a message, four all-reduces a layer: 51.5 GB; a ring of 8 moves 90."""
    message = 4 * 2048 * 8192 * 2
    assert message == pytest.approx(134 * 1e6, rel=0.01)
    assert message * 4 * 96 == pytest.approx(51.5 * GB, rel=0.01)
    moved = collectives.volumes("all_reduce", message, 8, 8).near * 4 * 96
    assert float(moved) == pytest.approx(90.2 * GB, rel=0.01)


def test_sixteen_bytes_a_parameter(run):
    """112 GB for 7B, 1,120 for 70B: BF16 weights and gradients, FP32 master and moments. FP32 gradients make it 18."""
    model = ModelShape.from_shape(layers=2, hidden=1024, heads=8, ffn=4096, vocab=1024)
    job = run(model, gpus=1, gbs=1, seq=128, sharding="none")
    for grads, per_parameter in (("fp32", 18), ("bf16", 16)):
        made = job.replace(options=replace(job.options, grads=grads))
        owners = memory.by_owner(made, columns.from_job(made))
        state = sum(float(owners[key][0]) for key in ("parameters", "gradients", "optimizer"))
        assert state == pytest.approx(per_parameter * model.parameters().total, rel=0.02)


@pytest.mark.parametrize(("billions", "milliseconds"), [(1, 7.8), (7, 54.4), (70, 544.4)])
def test_ddp_all_reduce_of_bf16_gradients_on_8_h100(billions, milliseconds):
    seconds = collectives.seconds("all_reduce", billions * 1e9 * 2, 8, 8, NVLINK)
    assert 1000 * float(seconds) == pytest.approx(milliseconds, abs=0.1)


def test_fsdp_gathers_7b_over_nvlink_and_over_infiniband():
    """14 GB on 8 ranks: 27 ms in a node; 245 ms where each rank is on a node of its own."""
    assert float(collectives.seconds("all_gather", 14 * GB, 8, 8, NVLINK)) == pytest.approx(0.0272, abs=1e-4)
    assert float(collectives.seconds("all_gather", 14 * GB, 8, 1, NVLINK)) == pytest.approx(0.245, abs=1e-3)


def test_65b_on_128_h100(run):
    """TP8 x PP4 x DP4 = 128, as published; a bubble of 10 % or less takes 27 micro-batches."""
    model = ModelShape.from_shape(name="65b", layers=80, hidden=8192, heads=64, ffn=22016, vocab=32000)
    assert model.total_parameters() == pytest.approx(65e9, rel=0.01)
    few = next(m for m in range(1, 100) if bubble(4, m) <= 0.1)
    assert few == 27
    rules = textbook.choose(run(model, gpus=128, seq=2048, gbs=4 * few))
    assert (rules.layout.tp, rules.layout.pp) == (8, 4)
    assert rules.bubble == pytest.approx(0.1)


def test_the_rules_say_what_they_cannot_hold(run):
    with pytest.raises(UserError, match="18 bytes per parameter"):
        textbook.choose(run("llama31_405b", gpus=8, gbs=8))


@pytest.mark.parametrize(("sharding", "per_gpu_gb"), [("zero1", 385), ("zero2", 262.5), ("zero3", 140)])
def test_70b_under_zero_on_8_gpus(run, sharding, per_gpu_gb):
    """385, 263 and 140 GB of states with 16 bytes a parameter, as often repeated: right, but before any activation."""
    model = ModelShape.from_shape(layers=2, hidden=1024, heads=8, ffn=4096, vocab=1024)
    job = run(model, gpus=8, gbs=8, seq=128, sharding=sharding)
    made = job.replace(options=replace(job.options, grads="bf16"))
    owners = memory.by_owner(made, columns.from_job(made))
    state = sum(float(owners[key][0]) for key in ("parameters", "gradients", "optimizer"))
    assert state / model.parameters().total * 70 == pytest.approx(per_gpu_gb, rel=0.03)
