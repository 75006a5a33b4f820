"""Tiny Hugging Face folders over every supported family and every key that changes the function, and what they give.

Weights are drawn wide enough that attention is sharp: a wrong rotation, window or scale then moves the logits by far
more than rounding does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.weights import matrix_spoil as spoil
from tests.weights import tiny

BASE: dict[str, Any] = tiny.SIZES | {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LATENT: dict[str, Any] = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 32}
LATENT |= {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4}
V3 = LATENT | {"n_group": 2, "topk_group": 1}
QWEN3_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
GEMMA = {"head_dim": 32}
OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8}


@dataclass(frozen=True)
class Case:
    """A folder, and the words of its refusal; "" where it goes to NeMo and back the same."""

    kind: str
    keys: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    dtype: str = "float32"
    change: spoil.Change | None = None
    raw: dict[str, Any] = field(default_factory=dict)
    """Keys written into config.json after transformers has saved the model."""
    spoilt: dict[str, Any] = field(default_factory=dict)
    """Fields of NeMo's class set wrong, as an importer with a mistake would."""
    checked: bool = True
    """With the forward check."""


BIASED = {"attention_bias": True, "mlp_bias": True}
ODD = {"vocab_size": 317}
CASES: dict[str, Case] = {
    "llama": Case("llama"),
    "llama, all heads": Case("llama", {"num_key_value_heads": 4}),
    "llama, one key head": Case("llama", {"num_key_value_heads": 1}),
    "llama, head_dim 32": Case("llama", {"head_dim": 32}),
    "llama, tied": Case("llama", {"tie_word_embeddings": True}),
    "llama, biases everywhere": Case("llama", BIASED),
    "llama, gelu": Case("llama", {"hidden_act": "gelu"}),
    "llama, gelu_pytorch_tanh": Case("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama, odd vocabulary": Case("llama", ODD),
    "llama, eps 1e-2, theta 777": Case("llama", {"rms_norm_eps": 1e-2, "rope_theta": 777.0}),
    "llama, linear rope": Case("llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "llama, llama3 rope": Case("llama", {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}}),
    "llama, bf16": Case("llama", dtype="bfloat16"),
    "llama, fp16, tied": Case("llama", {"tie_word_embeddings": True}, dtype="float16"),
    "llama, fp32 weights in a bf16 config": Case("llama", raw={"torch_dtype": "bfloat16", "dtype": "bfloat16"}),
    "llama, mixed fp32 and bf16": Case("llama", dtype="bfloat16", change=spoil.tensors(spoil.widen)),
    "llama, sharded": Case("llama", change=spoil.sharded),
    "llama, .bin": Case("llama", change=spoil.bin),
    "llama, no generation_config": Case("llama", change=spoil.drop("generation_config.json")),
    "llama, no padding (-1)": Case("llama", raw={"pad_token_id": -1}),
    "llama, rotary buffers": Case("llama", change=spoil.tensors(spoil.rotary_buffers)),
    "llama, rope_parameters": Case(
        "llama", {"rope_theta": 999.0}, raw={"rope_theta": None, "rope_parameters": {"rope_theta": 999.0}}
    ),
    "llama, unknown keys": Case("llama", raw={"clip_qkv": 8.0, "use_parallel_residual": False}),
    "llama, no forward check": Case("llama", checked=False),
    "mistral, window": Case("mistral", {"sliding_window": 8}),
    "mistral, no window, tied": Case("mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "mistral, no generation_config": Case("mistral", {"head_dim": 24}, change=spoil.drop("generation_config.json")),
    "mixtral": Case("mixtral", {"num_local_experts": 4}),
    "mixtral, window, three of five": Case(
        "mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 9} | ODD, dtype="bfloat16"
    ),
    "qwen2": Case("qwen2"),
    "qwen2, tied, bf16": Case("qwen2", {"tie_word_embeddings": True}, dtype="bfloat16"),
    "qwen2, window from layer 1": Case(
        "qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "num_hidden_layers": 3}
    ),
    "qwen3": Case("qwen3", {"head_dim": 32}),
    "qwen3, tied, layer_types": Case(
        "qwen3",
        {"head_dim": 16, "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 7}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3_moe, normalised": Case("qwen3_moe", QWEN3_MOE | {"norm_topk_prob": True}),
    "qwen3_moe, not normalised, bf16": Case("qwen3_moe", QWEN3_MOE, dtype="bfloat16"),
    "gemma": Case("gemma", GEMMA),
    "gemma2, window 8": Case("gemma2", GEMMA | {"sliding_window": 8, "query_pre_attn_scalar": 24}),
    "gemma2, bf16, no caps": Case(
        "gemma2",
        GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 12},
        dtype="bfloat16",
    ),
    "gemma3_text, linear rope": Case(
        "gemma3_text",
        GEMMA
        | {"sliding_window": 8, "num_hidden_layers": 7, "query_pre_attn_scalar": 24}
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "nemotron": Case("nemotron"),
    "nemotron, biases, a quarter rotated": Case("nemotron", BIASED | {"partial_rotary_factor": 0.25}),
    "phi3, groups, window": Case("phi3", {"sliding_window": 8}),
    "phi3, three quarters rotated, tied": Case("phi3", {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    "starcoder2": Case("starcoder2", {"sliding_window": 8}),
    "starcoder2, no biases": Case("starcoder2", {"use_bias": False}),
    "deepseek_v2, no query latent": Case("deepseek_v2", LATENT | {"q_lora_rank": None}),
    "deepseek_v3, groups, scaled": Case("deepseek_v3", V3 | {"routed_scaling_factor": 2.5}),
    "deepseek_v3, yarn": Case("deepseek_v3", V3 | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}}),
    "gpt_oss": Case("gpt_oss", OSS),
    "gpt_oss, MXFP4": Case(
        "gpt_oss",
        OSS,
        dtype="bfloat16",
        change=spoil.mxfp4,
        raw={"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}},
    ),
    "granite, softmax scale": Case("granite", {"attention_multiplier": 0.3}),
    "smollm3": Case("smollm3", {"num_hidden_layers": 4}),
    "seed_oss": Case("seed_oss", {"head_dim": 16}),
    # Refused, by key
    "llama, attention_bias alone": Case("llama", {"attention_bias": True}, "True and mlp_bias is False"),
    "llama, mlp_bias alone": Case("llama", {"mlp_bias": True}, "mlp_bias is True"),
    "qwen3, attention_bias": Case("qwen3", {"attention_bias": True}, "which would be lost"),
    "gemma, attention_bias": Case("gemma", GEMMA | {"attention_bias": True}, "which would be lost"),
    "llama, yarn": Case("llama", {"rope_scaling": YARN}, "rope_scaling has type 'yarn'"),
    "qwen2, llama3 rope": Case(
        "qwen2", {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}}, "rope_scaling has type 'llama3'"
    ),
    "llama, dynamic rope": Case(
        "llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling has type 'dynamic'"
    ),
    "phi3, longrope": Case(
        "phi3",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}}
        | {"original_max_position_embeddings": 64},
        "rope_scaling has type 'longrope'",
    ),
    "llama, tanh": Case("llama", {"hidden_act": "tanh"}, "hidden_act is 'tanh'"),
    "llama, partly rotated": Case("llama", raw={"partial_rotary_factor": 0.5}, refused="partial_rotary_factor is 0.5"),
    "qwen3_moe, dense layers": Case("qwen3_moe", QWEN3_MOE | {"mlp_only_layers": [0]}, "mlp_only_layers"),
    "deepseek_v3, not normalised": Case("deepseek_v3", V3 | {"norm_topk_prob": False}, "norm_topk_prob is false"),
    "deepseek_v3, other groups": Case("deepseek_v3", V3 | {"topk_group": 2}, "must be 2: transformers ranks groups"),
    "deepseek_v2, yarn": Case(
        "deepseek_v2", LATENT | {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}, "DeepSeek-V2's softmax"
    ),
    "granite, residual_multiplier": Case("granite", {"residual_multiplier": 0.2}, "residual_multiplier is 0.2"),
    "gemma3_text, bidirectional": Case(
        "gemma3_text", GEMMA, "use_bidirectional", raw={"use_bidirectional_attention": True}
    ),
    "olmo2": Case("olmo2", {}, "norms follow attention"),
    "a classifier": Case(
        "llama", raw={"architectures": ["LlamaForSequenceClassification"]}, refused="architectures is"
    ),
    "GPTQ": Case("llama", raw={"quantization_config": {"quant_method": "gptq"}}, refused="weights are in gptq"),
    "NaN": Case("llama", change=spoil.tensors(spoil.nan), refused="model.layers.1.mlp.down_proj.weight contains NaN"),
    "a shape": Case("llama", change=spoil.tensors(spoil.crop), refused="cannot read"),
    "an expert is missing": Case(
        "qwen3_moe",
        QWEN3_MOE,
        "lacks model.layers.1.mlp.experts.3.up_proj",
        change=spoil.tensors(spoil.one_expert_less),
    ),
    "an extra tensor": Case(
        "llama", change=spoil.tensors(spoil.extra), refused="contains model.layers.0.self_attn.q_norm.weight"
    ),
    "tied, with an output matrix of its own": Case(
        "llama",
        {"tie_word_embeddings": True},
        "lm_head.weight differs from the embedding",
        change=spoil.tensors(spoil.own_head),
    ),
    "tied, with an output matrix of its own, .bin": Case(
        "llama", {"tie_word_embeddings": True}, "lm_head.weight differs from the embedding", change=spoil.bin_own_head
    ),
    "scales of no quantization": Case("llama", change=spoil.tensors(spoil.scales), refused="q_proj.weight_scales"),
    "a tensor lies in two shards": Case("llama", change=spoil.twice, refused="twice"),
    "rope_theta is text": Case("llama", raw={"rope_theta": "10000"}, refused="rope_theta is '10000'"),
    "a smaller vocabulary than the tokenizer's": Case(
        "llama", {"vocab_size": 200}, "the model's vocab_size is only 200"
    ),
    "more layers in the weights": Case("llama", {"num_hidden_layers": 3}, "layers.2", raw={"num_hidden_layers": 2}),
    "fewer layers in the weights": Case("llama", raw={"num_hidden_layers": 3}, refused="lacks model.layers.2"),
    "unknown keys, no forward check": Case("llama", raw={"clip_qkv": 8.0}, refused="clip_qkv", checked=False),
    # Refused by the forward check alone
    "an importer's wrong theta": Case("llama", refused="rotary frequencies differ", spoilt={"rotary_base": 9000.0}),
    "an importer's wrong eps": Case("llama", refused="different function", spoilt={"layernorm_epsilon": 0.02}),
    "an importer's window one key too wide": Case(
        "mistral", {"sliding_window": 8}, "different function", spoilt={"window_size": [8, 0]}
    ),
    "an importer's window forgotten": Case(
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        "different function",
        spoilt={"window_size": None},
    ),
    "an importer's other router": Case(
        "mixtral", {"num_local_experts": 4}, "different function", spoilt={"moe_router_pre_softmax": True}
    ),
    "odd heads": Case("llama", {"head_dim": 15}, "RoPE requires an even number"),
    "a shard is missing": Case("llama", change=spoil.shard_lost, refused="which does not exist"),
    "no tokenizer": Case(
        "llama", change=spoil.drop("tokenizer*", "vocab*", "special*", "merges*"), refused="no tokenizer"
    ),
    "an adapter alone": Case("llama", change=spoil.adapter_only, refused="PEFT adapter"),
}
"""By what is special about them."""

MIXTURES: dict[str, Case] = {
    "llama mix": Case(
        "llama",
        BIASED
        | {
            "tie_word_embeddings": True,
            "head_dim": 24,
            "rope_scaling": {"type": "linear", "factor": 2.5},
            "vocab_size": 331,
            "hidden_act": "relu",
        },
        dtype="bfloat16",
        change=spoil.sharded,
    ),
    "gemma untied": Case("gemma", GEMMA | {"tie_word_embeddings": False, "hidden_act": "gelu"}),
    "gemma2 odd": Case(
        "gemma2",
        GEMMA
        | {
            "sliding_window": 5,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": False,
        },
        dtype="float16",
    ),
    "gemma3 pattern 3": Case(
        "gemma3_text",
        GEMMA
        | {
            "sliding_window": 5,
            "num_hidden_layers": 5,
            "layer_types": [
                "sliding_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "sliding_attention",
            ],
            "rope_theta": 5000.0,
            "rope_local_base_freq": 300.0,
        },
    ),
    "gemma3 bad": Case(
        "gemma3_text",
        GEMMA
        | {
            "sliding_window": 5,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        "layer_types must repeat N windowed layers and one full layer",
    ),
    "gemma3 all local": Case(
        "gemma3_text", GEMMA | {"sliding_window": 5, "num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}
    ),
    "starcoder2 untied relu": Case(
        "starcoder2", {"tie_word_embeddings": False, "hidden_act": "relu", "rope_theta": 123.0}
    ),
    "nemotron silu tied": Case("nemotron", {"hidden_act": "silu", "tie_word_embeddings": True, "head_dim": 32}),
    "mixtral gelu linear": Case(
        "mixtral",
        {"num_local_experts": 3, "hidden_act": "gelu_new", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "gpt_oss types": Case(
        "gpt_oss",
        OSS
        | {
            "layer_types": ["full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": True,
                "original_max_position_embeddings": 64,
            },
        },
        dtype="bfloat16",
    ),
    "deepseek_v3 no groups topk3": Case(
        "deepseek_v3",
        LATENT
        | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3, "first_k_dense_replace": 0, "q_lora_rank": None},
    ),
    "deepseek_v2 groups": Case(
        "deepseek_v2",
        LATENT
        | {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 3.0,
        },
    ),
    "qwen3 types no window": Case(
        "qwen3",
        {
            "head_dim": 16,
            "layer_types": ["full_attention", "full_attention"],
            "rope_theta": 77.0,
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    "qwen3_moe window": Case(
        "qwen3_moe",
        QWEN3_MOE
        | {"use_sliding_window": True, "sliding_window": 6, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "phi3 linear": Case(
        "phi3",
        {"num_key_value_heads": 1, "rope_scaling": None, "sliding_window": None, "hidden_act": "gelu"},
        dtype="float16",
    ),
    "llama, one layer, eight heads": Case(
        "llama", {"num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2}
    ),
    "smollm3 all rope tied false": Case("smollm3", {"no_rope_layers": [1, 1], "tie_word_embeddings": False}),
    "mistral window 1": Case("mistral", {"sliding_window": 1}),
}
"""Several keys at once."""
CASES |= {f"mixture: {name}": case for name, case in MIXTURES.items()}

SLOW = ("llama, biases everywhere", "mistral, window", "qwen3_moe, normalised", "gemma2, window 8", "gpt_oss", "NaN")
"""The small cross-section that is not `long`."""
