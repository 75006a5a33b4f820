"""StarCoder, Phi 3, Baichuan 2 and ChatGLM 3: dense models of small families.

Learning rates: StarCoder (arXiv:2305.06161, section 5.3), StarCoder 2 (arXiv:2402.19173, section 6). The other learning
rates, and all steps, are those of NeMo 2.7.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.collection.registry import model, nemo

if TYPE_CHECKING:
    import nemo_run as run

CODE = {"seq": 4096, "lr": 3e-4, "min_lr": 3e-5, "warmup_steps": 1000, "max_steps": 300_000}
CHAT = {"seq": 4096, "lr": 3e-4, "min_lr": 3e-5, "warmup_steps": 2000, "max_steps": 1_168_251}


@model(**CODE | {"seq": 8192}, hf="bigcode/starcoder")
def starcoder_15b() -> run.Config:
    """StarCoder 15B: dense, one query group, learned positions."""
    return nemo("StarcoderModel", "StarcoderConfig15B")


@model(**CODE, hf="bigcode/starcoder2-3b")
def starcoder2_3b() -> run.Config:
    """StarCoder 2 3B: dense, GQA with 2 groups, sliding window of 4,096."""
    return nemo("Starcoder2Model", "Starcoder2Config3B")


@model(**CODE, hf="bigcode/starcoder2-7b")
def starcoder2_7b() -> run.Config:
    """StarCoder 2 7B: dense, GQA with 4 groups, sliding window of 4,096."""
    return nemo("Starcoder2Model", "Starcoder2Config7B")


@model(**CODE, hf="bigcode/starcoder2-15b")
def starcoder2_15b() -> run.Config:
    """StarCoder 2 15B: dense, GQA with 4 groups, sliding window of 4,096."""
    return nemo("Starcoder2Model", "Starcoder2Config15B")


@model(**CHAT, hf="microsoft/Phi-3-mini-4k-instruct")
def phi3_mini() -> run.Config:
    """Phi 3 mini: 3.8B, dense, 4k positions."""
    return nemo("Phi3Model", "Phi3ConfigMini")


@model(**CHAT, hf="baichuan-inc/Baichuan2-7B-Base")
def baichuan2_7b() -> run.Config:
    """Baichuan 2 7B: dense, 4k positions."""
    return nemo("Baichuan2Model", "Baichuan2Config7B")


@model(**CHAT | {"seq": 8192}, hf="THUDM/chatglm3-6b")
def chatglm3_6b() -> run.Config:
    """ChatGLM 3 6B: dense, GQA with 2 groups, RoPE on half of each head."""
    return nemo("ChatGLMModel", "ChatGLM3Config6B")
