"""A checkpoint's bytes on disk, counted by hand."""

import pytest

from superpod.planner import memory
from superpod.planner.planned_job import Options
from tests.planner.memory.test_memory import job
from tests.planner.memory.test_memory_terms import DENSE

# Two layers of 590 parameters (norms 20, qkv 240, projection 120, gate and up 140, down 70), a final norm of 10, and
# embedding and head of 128 x 10.
PARAMETERS = 2 * 590 + 10 + 2 * 1280


@pytest.mark.parametrize(("precision", "each"), [("bf16", 14), ("fp16", 14), ("fp32", 12), ("tf32", 12)])
def test_bytes_of_a_checkpoint(precision, each):
    assert memory.checkpoint_bytes(job(DENSE, seq=16, precision=precision)) == each * PARAMETERS


@pytest.mark.parametrize("tp", [1, 2])
def test_an_adapters_checkpoint_has_the_adapter_alone(tp):
    options = Options(lora_rank=2, lora_targets=("linear_qkv",))
    of = job(DENSE, gpus=tp, seq=16, tp=tp, task="lora", options=options)
    assert memory.checkpoint_bytes(of) == 14 * 2 * 2 * (10 + 24)
