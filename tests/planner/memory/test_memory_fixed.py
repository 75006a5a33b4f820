"""A checkpoint's bytes on disk and a serving model's cache, counted by hand."""

from dataclasses import replace

import pytest

from superpod.errors import UserError
from superpod.planner import memory
from superpod.planner.models import Split
from superpod.planner.planned_job import Options
from tests.planner.memory.test_memory import job
from tests.planner.memory.test_memory_terms import DENSE, MLA

# Two layers of 590 parameters (norms 20, qkv 240, projection 120, gate and up 140, down 70), a final norm of 10, and
# embedding and head of 128 x 10.
EVEN = replace(DENSE, ffn=8)
PARAMETERS = 2 * 590 + 10 + 2 * 1280


@pytest.mark.parametrize(("precision", "each"), [("bf16", 14), ("fp16", 14), ("fp32", 12), ("tf32", 12)])
def test_bytes_of_a_checkpoint(precision, each):
    assert memory.checkpoint_bytes(job(DENSE, seq=16, precision=precision)) == each * PARAMETERS


@pytest.mark.parametrize("tp", [1, 2])
def test_an_adapters_checkpoint_has_the_adapter_alone(tp):
    options = Options(lora_rank=2, lora_targets=("linear_qkv",))
    of = job(DENSE, gpus=tp, seq=16, tp=tp, task="lora", options=options)
    assert memory.checkpoint_bytes(of) == 14 * 2 * 2 * (10 + 24)


@pytest.mark.parametrize(
    ("model", "split", "cache", "per_token"),
    [
        (DENSE, {}, "", 2 * 2 * 6 * 2),  # keys and values, two layers, two groups of 3 channels, 2 bytes
        (DENSE, {}, "fp8", 2 * 2 * 6),
        (EVEN, {"tp": 2}, "", 2 * 2 * 6 * 2 / 2),
        (DENSE, {"pp": 2}, "", 2 * 6 * 2),
        (replace(MLA, ffn=8), {"tp": 2}, "", 2 * (7 + 2) * 2),  # the latent and the rotary key, whole on every rank
    ],
)
def test_a_cache_of_keys_and_values(model, split, cache, per_token):
    serving = memory.inference(model, Split(**split), 16, 3, cache=cache)
    assert serving.kv_per_token == pytest.approx(per_token)
    assert serving.kv_cache == pytest.approx(3 * 16 * per_token)
    assert serving.total == serving.weights + serving.kv_cache


def test_weights_of_the_fullest_gpu():
    assert memory.inference(DENSE, Split(), 16, 1).weights == 2 * PARAMETERS
    assert memory.inference(DENSE, Split(), 16, 1, "fp8").weights == PARAMETERS
    assert memory.inference(DENSE, Split(pp=2), 16, 1).weights == 2 * (590 + 10 + 1280)  # the head's
    for dtype, cache in (("bf15", ""), ("bf16", "fp7")):
        with pytest.raises(UserError, match=f"there is no data type '{cache or dtype}'"):
            memory.inference(DENSE, Split(), 16, 1, dtype, cache)
