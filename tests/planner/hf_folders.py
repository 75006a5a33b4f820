"""hf_folders.py FOLDER: small Hugging Face folders of many families; prints {case: parameters of transformers' model}.

A process of its own, with transformers. The weights are on the meta device: nothing is allocated.
"""

import json
import sys
from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {
    **{"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 256, "pad_token_id": 0},
}
ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2}
SPARSE = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
GROUPED = {
    **{"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    **{"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
}
SHARED = {**SPARSE, "shared_expert_intermediate_size": 48}
BIASED = {"attention_bias": True}
HEAD = {"head_dim": 16}
GPT = {"n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 128}

KINDS: dict[str, list[dict[str, Any]]] = {
    "llama": [{}, BIASED, {"mlp_bias": True}, {"head_dim": 24}, {"tie_word_embeddings": True}],
    "qwen3": [BIASED],
    "qwen2_moe": [SHARED, {**SHARED, "mlp_only_layers": [0]}, {**SHARED, "qkv_bias": False}],
    "olmo2": [{}, BIASED],
    "olmo3": [{}],
    "olmoe": [{"num_experts": 4, "num_experts_per_tok": 2}],
    "granite": [{}, {**BIASED, "mlp_bias": True}],
    "granitemoe": [ROUTED],
    "granitemoeshared": [{**ROUTED, "shared_intermediate_size": 48}],
    "cohere": [{}, BIASED],
    "cohere2": [{}],
    "stablelm": [{}, {"use_qkv_bias": True}, {"use_parallel_residual": True}],
    "gpt_neox": [{}],
    "falcon": [
        {},
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"bias": True, "multi_query": False},
        {"parallel_attn": False},
    ],
    "gpt_bigcode": [GPT],
    "glm": [HEAD, {**HEAD, "attention_bias": False}],
    "glm4": [HEAD],
    "glm4_moe": [{**GROUPED, **HEAD}, {**GROUPED, **HEAD, **BIASED, "use_qk_norm": True}],
    "dots1": [GROUPED],
    "ernie4_5": [HEAD, {**HEAD, "use_bias": True}],
    "exaone4": [{}],
    "smollm3": [{}],
    "seed_oss": [HEAD, {**HEAD, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True}],
    "helium": [HEAD],
    "arcee": [{}, {**BIASED, "mlp_bias": True}],
    "hunyuan_v1_dense": [HEAD],
    "ministral": [HEAD],
    "phi": [{}],
    "phimoe": [ROUTED],
    "olmo": [{}],
}
"""model_type -> keys over those of `SMALL`, a model each."""

NOT_EXACT = {"phi": -256, "olmo": 576}
"""model_type -> what its shape counts too many, which is said: a head's bias, norms without weights."""

FROM_THE_HUB: dict[str, tuple[dict[str, Any], int]] = {
    # huggingface.co/internlm/internlm3-8b-instruct, config.json and the sum over model.safetensors.index.json
    "internlm3": (
        {
            **{"num_hidden_layers": 48, "hidden_size": 4096, "intermediate_size": 10240, "num_attention_heads": 32},
            **{"num_key_value_heads": 2, "head_dim": 128, "vocab_size": 128512, "bias": False, "qkv_bias": False},
        },
        8_804_241_408,
    ),
    # huggingface.co/internlm/internlm2-7b
    "internlm2": (
        {
            **{"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
            **{"num_key_value_heads": 8, "vocab_size": 92544, "bias": False},
        },
        7_737_708_544,
    ),
    # huggingface.co/baichuan-inc/Baichuan2-7B-Base: 7,505,973,248 in its index
    "baichuan": (
        {
            **{"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32},
            "vocab_size": 125696,
        },
        7_505_973_248,
    ),
    # huggingface.co/THUDM/chatglm3-6b
    "chatglm": (
        {
            **{"num_layers": 28, "hidden_size": 4096, "ffn_hidden_size": 13696, "num_attention_heads": 32},
            **{"kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2, "add_qkv_bias": True},
            **{"padded_vocab_size": 65024, "add_bias_linear": False},
        },
        6_243_584_000,
    ),
}
"""Architectures whose code is on the hub only: a published configuration, and the parameters it comes to."""


def main(folder: str) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    counted = {}
    for kind, cases in KINDS.items():
        for number, keys in enumerate(cases):
            config = CONFIG_MAPPING[kind](**{**SMALL, **keys})
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            counted[f"{kind}-{number}"] = sum(p.numel() for p in model.parameters())
            config.save_pretrained(Path(folder, f"{kind}-{number}"))
    print("RESULT" + json.dumps(counted))


if __name__ == "__main__":
    main(sys.argv[1])
