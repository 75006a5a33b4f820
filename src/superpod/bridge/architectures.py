"""Find the Hugging Face architecture of a NeMo model, by which Megatron-Bridge selects its model provider."""

from __future__ import annotations

import re

from superpod.bridge import facts

ARCHITECTURES = (
    (r"Llama32(Embedding|Reranker)|Bert|T5|Hyena|GPTConfig|BaseMamba|NVIDIAMamba", None),
    (r"Llama4", "Llama4ForConditionalGeneration"),
    (r"Llama31NemotronUltra|Llama33NemotronSuper", "DeciLMForCausalLM"),
    (r"(Code)?Llama", "LlamaForCausalLM"),
    (r"NemotronH|NemotronNano", "NemotronHForCausalLM"),
    (r"Nemotron", "NemotronForCausalLM"),
    (r"Qwen3(MoE|Config\d+B_A)", "Qwen3MoeForCausalLM"),
    (r"Qwen3", "Qwen3ForCausalLM"),
    (r"Qwen2", "Qwen2ForCausalLM"),
    (r"Mixtral", "MixtralForCausalLM"),
    (r"Mistral", "MistralForCausalLM"),
    (r"DeepSeekV2", "DeepseekV2ForCausalLM"),
    (r"DeepSeekV3", "DeepseekV3ForCausalLM"),
    (r"Gemma2", "Gemma2ForCausalLM"),
    (r"Gemma3", "Gemma3ForCausalLM"),
    (r"Gemma", "GemmaForCausalLM"),
    (r"GPTOSS", "GptOssForCausalLM"),
    (r"Starcoder2", "Starcoder2ForCausalLM"),
    (r"Starcoder", "GPTBigCodeForCausalLM"),
    (r"Phi3", "Phi3ForCausalLM"),
    (r"Baichuan", "BaichuanForCausalLM"),
    (r"ChatGLM", "ChatGLMModel"),
)
"""Start of the name of NeMo's configuration class -> class of transformers; None for encoders, embedding models and
others that Megatron-Bridge does not train. The first match counts."""

NEEDS_REMOTE_CODE = ("DeciLMForCausalLM",)
"""Architectures that transformers does not contain."""


def find_architecture(config_class: str) -> str | None:
    """Return the Hugging Face architecture of NeMo's configuration class, such as `Llama3Config8B`; None if unknown."""
    for pattern, architecture in ARCHITECTURES:
        if re.match(pattern, config_class):
            return architecture
    return None


def missing_reason(config_class: str, hf_model: str) -> str | None:
    """Return why Megatron-Bridge cannot build the model, or None if it can.

    Args:
        config_class: name of NeMo's configuration class.
        hf_model: Hugging Face ID or folder of the model, or "".
    """
    stack = f"Megatron-Bridge {facts.version()}"
    architecture = find_architecture(config_class)
    if architecture is None:
        return f"{stack} has no counterpart of NeMo's {config_class}"
    if architecture in NEEDS_REMOTE_CODE:
        return f"{stack} executes code from the Hugging Face Hub for {architecture} (trust_remote_code)"
    if architecture not in facts.stack()["architectures"]:
        return f"{stack} does not support {architecture}"
    if not hf_model:
        return f"{stack} creates models from a Hugging Face configuration, and this model has no Hugging Face ID"
    return None
