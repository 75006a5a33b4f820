"""A recipe whose moments are BF16 is rehearsed with FP32 ones: Megatron's own Adam takes no other."""

import pytest


@pytest.mark.nemo
@pytest.mark.filterwarnings("ignore")  # of NeMo's own imports
def test_bf16_moments_are_fp32_on_cpus():
    import torch

    from superpod import recipes
    from superpod.rehearsal import cpu_recipe

    partial = recipes.build("deepseek_v3_pretrain_h100_bf16")
    assert partial.optim.config.exp_avg_dtype is torch.bfloat16
    small, changes = cpu_recipe.rehearse(partial, devices=8 * 16)
    config = small.optim.config
    assert (config.exp_avg_dtype, config.exp_avg_sq_dtype) == (torch.float32, torch.float32)
    assert not config.use_precision_aware_optimizer
    assert {"optim.config.exp_avg_dtype", "optim.config.exp_avg_sq_dtype"} <= {change.path for change in changes}
