"""What selective recomputation cannot give up."""

from superpod.planner.planned_job import Options
from tests.planner.memory.test_memory import LLAMA, job, total


def test_a_norm_inside_the_next_product_stays():
    """Transformer Engine's LayerNormLinear: Megatron has no norm to recompute there."""
    none, some = (job(model=LLAMA, recompute=how, recompute_modules=("layernorm",)) for how in ("none", "selective"))
    assert total(some) == total(none)
    local = Options(impl="local")
    assert total(some.replace(options=local)) < total(none.replace(options=local))
