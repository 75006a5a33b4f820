"""A recipe whose moments are BF16 is rehearsed with FP32 ones: Megatron's own Adam takes no other."""

import pytest


@pytest.mark.nemo
@pytest.mark.filterwarnings("ignore")  # of NeMo's own imports
@pytest.mark.parametrize("available", [True, False])
def test_bf16_moments_need_transformer_engines_adam(available, monkeypatch):
    import torch

    from superpod import recipes
    from superpod.rehearsal.te import source
    from superpod.rehearsal.training import cpu_recipe

    monkeypatch.setattr(source, "is_installed", lambda: available)
    partial = recipes.build("deepseek_v3_pretrain_h100_bf16")
    assert partial.optim.config.exp_avg_dtype is torch.bfloat16
    small, changes = cpu_recipe.rehearse(partial, devices=8 * 16)
    config = small.optim.config
    moments = torch.bfloat16 if available else torch.float32
    assert (config.exp_avg_dtype, config.exp_avg_sq_dtype) == (moments, moments)
    assert config.use_precision_aware_optimizer == available
    changed = {"optim.config.exp_avg_dtype", "optim.config.exp_avg_sq_dtype"} & {change.path for change in changes}
    assert bool(changed) != available
