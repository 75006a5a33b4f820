"""DeepSeek V2 and V3: multi-head latent attention and many small experts.

Learning rates: DeepSeek-V2 (arXiv:2405.04434, section 3.1.2 and appendix B), DeepSeek-V3 (arXiv:2412.19437, section
4.2). Steps: the 8.1 (V2), 5.7 (V2 Lite) and 14.8 (V3) trillion tokens of these papers at the recipe's global batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.collection.registry import model, nemo

if TYPE_CHECKING:
    import nemo_run as run

V2 = {"seq": 4096, "warmup_steps": 2000, "lr": 2.4e-4, "min_lr": 2.4e-5}

FP8_WEIGHTS = "its weights are in FP8, with a quantization_config (gpt/model/deepseek.py:263)"
AS_BF16 = (
    "convert it to BF16 with inference/fp8_cast_bf16.py of github.com/deepseek-ai/DeepSeek-V3, remove "
    "quantization_config from its config.json, import that folder, and set resume.restore_config.path to the result"
)


@model(**V2 | {"lr": 4.2e-4, "min_lr": 4.2e-5}, max_steps=301_996, hf="deepseek-ai/DeepSeek-V2-Lite")
def deepseek_v2_lite() -> run.Config:
    """DeepSeek V2 Lite: 16B, 64 experts, 6 active, latent attention."""
    return nemo("DeepSeekModel", "DeepSeekV2LiteConfig")


@model(**V2, max_steps=858_307, hf="deepseek-ai/DeepSeek-V2")
def deepseek_v2() -> run.Config:
    """DeepSeek V2: 236B, 160 experts, 6 active, latent attention."""
    return nemo("DeepSeekModel", "DeepSeekV2Config")


@model(
    **V2 | {"lr": 2.2e-4, "min_lr": 2.2e-5},
    max_steps=235_240,
    mtp_layers=1,
    hf="deepseek-ai/DeepSeek-V3-Base",
    not_imported=FP8_WEIGHTS,
    import_instead=AS_BF16,
)
def deepseek_v3() -> run.Config:
    """DeepSeek V3: 671B, 256 experts, 8 active, latent attention, one MTP layer."""
    return nemo("DeepSeekModel", "DeepSeekV3Config", mtp_num_layers=1, mtp_loss_scaling_factor=0.1)
