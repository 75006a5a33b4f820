"""`python -m tests.nemo2.doubled`: check that built recipes do not change if predicted step times double."""

import sys

from fiddle import printing

from superpod.collection import recipe_job, registry, save_interval
from superpod.collection.sizes.sized import Size, adapt
from superpod.nemo2.build import partial
from superpod.planner import predict
from superpod.planner.timing import steptime

RECIPES = {
    "llama3_8b_pretrain_h100_bf16": 1,
    "llama3_70b_pretrain_h100_fp8cs": 16,
    "deepseek_v3_pretrain_h100_bf16": None,
    "mixtral_8x7b_lora_h200_bf16": None,
    "llama31_8b_sft_b200_mxfp8": None,
    "gpt_oss_20b_sft_b300_bf16": None,
}
"""Recipe -> nodes."""


def built() -> dict[str, list[str]]:
    """Return every field of each recipe as text."""
    return {
        name: sorted(map(str, printing.as_dict_flattened(partial.build(registry.find(name), nodes)).items()))
        for name, nodes in RECIPES.items()
    }


def main() -> int:
    before, real = built(), steptime.step
    steptime.step = lambda *args: doubled(real(*args))
    recipe = registry.find("llama3_8b_pretrain_h100_bf16")
    taken = predict.one(recipe_job.job(recipe)).step_time_s
    print(taken, sum(map(len, before.values())))
    after = built()
    on_the_spot = adapt(recipe, Size(num_nodes=3, gbs=480))
    assert on_the_spot.saves == {}
    assert save_interval.save_every(on_the_spot, 3) == save_interval.choose_interval(
        predict.one(recipe_job.job(on_the_spot, 3)).step_time_s
    )
    return int(before != after)


def doubled(step: steptime.Step) -> steptime.Step:
    return steptime.Step(2 * step.seconds, {key: 2 * part for key, part in step.terms.items()})


if __name__ == "__main__":
    sys.exit(main())
