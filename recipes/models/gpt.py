"""GPT-3 and GPT-OSS.

GPT-3 175B: learning rate from Language Models are Few-Shot Learners (arXiv:2005.14165), table 2.1; steps for twice the
300 billion tokens of the paper, as in MLPerf. OpenAI published neither for GPT-OSS: fine-tuning uses the values of NeMo
2.7.3, pretraining those of other models of this size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.collection.registry import model, nemo

if TYPE_CHECKING:
    from collections.abc import Callable

    import nemo_run as run
    import torch

GPT3 = {"seq": 2048, "lr": 6e-5, "min_lr": 6e-6, "warmup_steps": 2000, "max_steps": 143_051}
GPT_OSS = {"seq": 4096, "lr": 3e-4, "min_lr": 3e-5, "warmup_steps": 500, "max_steps": 300_000}


@model(**GPT3)
def gpt3_175b() -> run.Config:
    """GPT-3 175B: dense, learned positions, 96 layers, hidden size 12,288."""
    # NeMo's class uses a Transformer Engine layer from nemo.collections.nlp, which was removed in NeMo 2.7.
    return nemo("GPTModel", "GPTConfig175B", use_transformer_engine_full_layer_spec=False)


@model(**GPT_OSS, hf="openai/gpt-oss-20b")
def gpt_oss_20b() -> run.Config:
    """GPT-OSS 20B: 32 experts, 4 active, sliding window in every other layer, attention sinks."""
    return nemo("GPTOSSModel", "GPTOSSConfig20B", activation_func=_fused_quick_gelu())


@model(**GPT_OSS, hf="openai/gpt-oss-120b")
def gpt_oss_120b() -> run.Config:
    """GPT-OSS 120B: 128 experts, 4 active, sliding window in every other layer, attention sinks."""
    return nemo("GPTOSSModel", "GPTOSSConfig120B", activation_func=_fused_quick_gelu())


def _fused_quick_gelu() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the quick GeLU for which Megatron-Core 0.15.3 has a fused kernel.

    NeMo 2.7.3's class uses that of megatron.core.activations, which Megatron rejects (transformer_config.py:1203).
    """
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    return quick_gelu
