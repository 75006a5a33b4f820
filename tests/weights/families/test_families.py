"""What each family's config.json means, field by field, as its model card and transformers' modeling file have it."""

import re

import pytest

from superpod.errors import UserError
from superpod.weights.families import nemo_class
from tests.weights import tiny
from tests.weights.matrix_cases import LATENT, LLAMA3, OSS, QWEN3_MOE, V3

COMMON = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,  # 64 / 4
    "layernorm_epsilon": 1e-6,
    "vocab_size": 320,
    "seq_length": 128,
    "init_method_std": 0.02,
    "share_embeddings_and_output_weights": False,
    "activation_func": "silu",
    "rotary_base": 10_000.0,
}
"""Of tiny.SIZES, with transformers' defaults of Llama."""
LLAMA = COMMON | {"add_bias_linear": False}
NO_WINDOW = {"window_size": None}
GEMMA = {"kv_channels": 32, "activation_func": "gelu_tanh", "share_embeddings_and_output_weights": True}
MLA = COMMON | {
    "num_query_groups": 4,
    "rotary_base": 10_000.0,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 64,  # two shared experts of 32
    "moe_layer_freq": [0, 1],  # first_k_dense_replace 1
    "moe_router_topk": 2,
    "moe_router_pre_softmax": True,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "qk_layernorm": True,
    "rope_type": "rope",
    "rotary_scaling_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}
SOFTMAX = {
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_topk_scaling_factor": 1.0,
}
SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
}
YARN = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
GPT_OSS = COMMON | {
    "kv_channels": 16,
    "layernorm_epsilon": 1e-5,
    "rotary_base": 150_000.0,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_pre_softmax": False,
    "moe_ffn_hidden_size": 96,
    "yarn_rotary_scaling_factor": 32.0,
    "yarn_original_max_position_embeddings": 4096,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_correction_range_round_to_int": False,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "window_size": [7, 0],
    "window_attn_skip_freq": [1, 0],  # gpt-oss begins with a windowed layer
}
del GPT_OSS["activation_func"]

READ = {
    "llama": ("llama", {}, LLAMA),
    "llama, biases everywhere": (
        "llama",
        {"attention_bias": True, "mlp_bias": True},
        LLAMA | {"add_bias_linear": True},
    ),
    "llama, llama3 rope": (
        "llama",
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}},
        LLAMA | {"scale_factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "old_context_len": 64},
    ),
    "llama, rope of type default": ("llama", {"rope_scaling": {"rope_type": "default"}}, LLAMA),
    "llama, other spellings": (
        "llama",
        {"head_dim": 8, "hidden_act": "gelu_new", "initializer_range": 0.5, "tie_word_embeddings": True},
        LLAMA
        | {"kv_channels": 8, "activation_func": "gelu_tanh", "init_method_std": 0.5}
        | {"share_embeddings_and_output_weights": True},
    ),
    "granite": ("granite", {"attention_multiplier": 0.25}, LLAMA | {"softmax_scale": 0.25}),
    "smollm3": (
        "smollm3",  # every fourth layer does not rotate (no_rope_layer_interval 4)
        {"num_hidden_layers": 5, "rope_theta": 10_000.0},
        LLAMA
        | {"num_layers": 5, "no_rope_freq": [0, 0, 0, 1, 0], "share_embeddings_and_output_weights": True},
    ),
    "smollm3, a list": ("smollm3", {"no_rope_layers": [0, 1], "tie_word_embeddings": False, "rope_theta": 1e4},
                        LLAMA | {"no_rope_freq": [1, 0]}),
    "smollm3, all rotate": ("smollm3", {"no_rope_layers": [1, 1], "tie_word_embeddings": False, "rope_theta": 1e4},
                            LLAMA),
    "seed_oss": ("seed_oss", {"head_dim": 16}, LLAMA | {"add_qkv_bias": True}),
    "seed_oss, no biases": (
        "seed_oss", {"head_dim": 16, "attention_bias": False}, LLAMA | {"add_qkv_bias": False}
    ),
    "mistral": ("mistral", {}, COMMON | {"window_size": [4095, 0], "cp_comm_type": "a2a"}),
    "mistral, no window": ("mistral", {"sliding_window": None}, COMMON | NO_WINDOW | {"cp_comm_type": None}),
    "qwen2": ("qwen2", {}, COMMON | NO_WINDOW | {"add_qkv_bias": True}),
    "qwen2, a window from layer 2 of 4": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "num_hidden_layers": 4},
        COMMON
        | {"num_layers": 4, "window_size": [7, 0], "window_attn_skip_freq": [0, 0, 1, 1], "add_qkv_bias": True},
    ),
    "qwen3": (
        "qwen3", {}, COMMON | NO_WINDOW | {"kv_channels": 128, "qk_layernorm": True, "add_qkv_bias": False}
    ),
    "qwen3, layer_types": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
        COMMON
        | {"kv_channels": 128, "qk_layernorm": True, "add_qkv_bias": False}
        | {"window_size": [7, 0], "window_attn_skip_freq": [0, 1]},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        QWEN3_MOE,
        COMMON
        | NO_WINDOW
        | {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_router_pre_softmax": True}
        | {"qk_layernorm": True, "add_qkv_bias": False},
    ),
    "qwen3_moe, a window": (
        "qwen3_moe",
        QWEN3_MOE | {"norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 8},
        COMMON
        | {"window_size": [7, 0], "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}
        | {"moe_router_pre_softmax": False, "qk_layernorm": True, "add_qkv_bias": False},
    ),
    "mixtral": (
        "mixtral",
        {},
        COMMON
        | NO_WINDOW
        | {"layernorm_epsilon": 1e-5, "rotary_base": 1e6}
        | {"num_moe_experts": 8, "moe_router_topk": 2, "moe_router_pre_softmax": False},
    ),
    "gemma": ("gemma", {"head_dim": 32}, COMMON | GEMMA),
    "gemma2": (
        "gemma2",
        {"head_dim": 32, "num_hidden_layers": 3, "sliding_window": 8, "query_pre_attn_scalar": 24},
        COMMON
        | GEMMA
        | {"num_layers": 3, "window_size": [7, 0], "window_attn_skip_freq": [1, 0, 1], "query_pre_attn_scalar": 24}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma2, no window": (
        "gemma2",
        {"head_dim": 32, "layer_types": ["full_attention"] * 2, "query_pre_attn_scalar": 24},
        COMMON
        | GEMMA
        | NO_WINDOW
        | {"window_attn_skip_freq": None, "query_pre_attn_scalar": 24}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": (
        "gemma3_text",  # five layers of 512 tokens, then one of all
        {"head_dim": 32, "num_hidden_layers": 7, "sliding_window": 512, "query_pre_attn_scalar": 64},
        COMMON
        | GEMMA
        | {"num_layers": 7, "rotary_base": (10_000.0, 1_000_000.0), "rope_scaling_factor": 1.0}
        | {"interleaved_attn_pattern": (5, 1), "window_size": 511, "softmax_scale": 0.125}
        | {"is_vision_language": False},
    ),
    "gemma3_text, linear, every third": (
        "gemma3_text",
        {"head_dim": 32, "num_hidden_layers": 3, "sliding_window_pattern": 3, "query_pre_attn_scalar": 64}
        | {"sliding_window": 512, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        COMMON
        | GEMMA
        | {"num_layers": 3, "rotary_base": (10_000.0, 1_000_000.0), "rope_scaling_factor": 8.0}
        | {"interleaved_attn_pattern": (2, 1), "window_size": 511, "softmax_scale": 0.125}
        | {"is_vision_language": False},
    ),
    "gemma3_text, no layer sees all": (
        "gemma3_text",  # three local layers to one global that two layers never reach
        {"head_dim": 32, "sliding_window": 512, "query_pre_attn_scalar": 64},
        COMMON
        | GEMMA
        | {"rotary_base": (10_000.0, 1_000_000.0), "rope_scaling_factor": 1.0}
        | {"interleaved_attn_pattern": (2, 1), "window_size": 511, "softmax_scale": 0.125}
        | {"is_vision_language": False},
    ),
    "nemotron": (
        "nemotron",
        {},
        LLAMA | {"activation_func": "relu2", "layernorm_epsilon": 1e-5, "rotary_percent": 0.5},
    ),
    "phi3, a window": (
        "phi3",
        {"sliding_window": 8, "partial_rotary_factor": 0.75},
        COMMON | {"layernorm_epsilon": 1e-5, "rotary_percent": 0.75, "window_size": [7, 0]},
    ),
    "starcoder2": (
        "starcoder2",
        {"sliding_window": 8},
        COMMON
        | {"layernorm_epsilon": 1e-5, "activation_func": "gelu_tanh", "share_embeddings_and_output_weights": True}
        | {"window_size": [7, 0], "add_bias_linear": True},
    ),
    "gpt_oss": ("gpt_oss", OSS, GPT_OSS),
    "gpt_oss, mscale": (
        "gpt_oss",
        OSS | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.5, "mscale_all_dim": 0.25}},
        GPT_OSS
        | {"yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 128}
        | {"yarn_beta_fast": 32, "yarn_beta_slow": 1, "yarn_correction_range_round_to_int": True}
        | {"yarn_mscale": 0.5, "yarn_mscale_all_dim": 0.25},
    ),
    "deepseek_v2, no query latent": ("deepseek_v2", LATENT | {"q_lora_rank": None},
                                     MLA | SOFTMAX | {"q_lora_rank": None}),
    "deepseek_v2, groups": (
        "deepseek_v2",
        LATENT | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        MLA | SOFTMAX | {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    ),
    "deepseek_v2, groups that greedy does not read": ("deepseek_v2", LATENT | {"n_group": 4, "topk_group": 2},
                                                      MLA | SOFTMAX),
    "deepseek_v3": ("deepseek_v3", V3, MLA | SIGMOID | {"moe_router_num_groups": 2, "moe_router_group_topk": 1}),
    "deepseek_v3, one group": ("deepseek_v3", V3 | {"n_group": 1}, MLA | SIGMOID),
    "deepseek_v3, yarn": (
        "deepseek_v3",
        V3 | {"rope_scaling": YARN | {"mscale": 0.5, "mscale_all_dim": 0.25, "beta_fast": 16, "beta_slow": 2}},
        MLA
        | SIGMOID
        | {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "rope_type": "yarn", "rotary_scaling_factor": 40}
        | {"original_max_position_embeddings": 4096, "beta_fast": 16, "beta_slow": 2}
        | {"mscale": 0.5, "mscale_all_dim": 0.25},
    ),
    "deepseek_v3, yarn without numbers": (
        "deepseek_v3",
        V3 | {"rope_scaling": {"type": "yarn", "factor": 40}},
        MLA
        | SIGMOID
        | {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "rope_type": "yarn", "rotary_scaling_factor": 40}
        | {"original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1},
    ),
}  # fmt: skip


def read(kind, keys):
    return nemo_class.find_nemo_class({**tiny.SIZES, "model_type": kind, **keys})


@pytest.mark.parametrize("name", READ)
def test_a_configuration_becomes_these_fields(name):
    kind, keys, fields = READ[name]
    assert read(kind, keys).fields == fields


@pytest.mark.parametrize(
    ("kind", "heads", "groups", "channels"),
    [("llama", 16, 16, 4), ("mistral", 16, 8, 4), ("qwen3", 32, 32, 128), ("gpt_oss", 16, 8, 64)],
)
def test_an_absent_key_has_its_familys_default_and_not_none(kind, heads, groups, channels):
    """Llama: as many groups as heads, and hidden_size / heads channels; the others state numbers of their own."""
    keys = {key: value for key, value in tiny.SIZES.items() if key != "num_key_value_heads"}
    fields = nemo_class.find_nemo_class({**keys, "model_type": kind, "num_attention_heads": heads}).fields
    assert (fields["num_query_groups"], fields["kv_channels"]) == (groups, channels)


def test_only_llama3_scaling_takes_llama31s_class():
    assert read("llama", {}).config == "LlamaConfig"
    assert read("llama", READ["llama, llama3 rope"][1]).config == "Llama31Config"


def test_a_doubt_is_where_transformers_leaves_deepseek_v2s_factor_out():
    yarn = LATENT | {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}
    [doubt] = read("deepseek_v2", yarn).doubts
    assert "mscale_all_dim" in doubt
    assert read("deepseek_v2", LATENT | {"rope_scaling": YARN}).doubts == ()
    assert read("deepseek_v3", V3 | {"rope_scaling": yarn["rope_scaling"]}).doubts == ()


REFUSED = [
    ("llama", {"attention_bias": True}, "biases in all linear layers or in none"),
    ("llama", {"mlp_bias": True}, "biases in all linear layers or in none"),
    ("llama", {"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'"),
    ("llama", {"head_dim": 15}, "a head has 15 channels"),
    ("llama", {"partial_rotary_factor": 0.5}, "rotates complete heads"),
    ("llama", {"rope_interleaved": True}, "rotates the halves of a head"),
    ("llama", {"rope_interleave": True}, "rotates the halves of a head"),
    ("mistral", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}}, "has type 'llama3'"),
    ("granite", {"logits_scaling": 8.0}, "logits_scaling is 8.0"),
    ("granite", {"residual_multiplier": 0.22}, "residual_multiplier is 0.22"),
    ("granite", {"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0"),
    ("smollm3", {"use_sliding_window": True}, "does not support sliding windows"),
    ("smollm3", {"layer_types": ["sliding_attention", "full_attention"]}, "does not support sliding windows"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must have 2 entries"),
    ("seed_oss", {"attention_out_bias": True}, "attention_out_bias is True"),
    ("seed_oss", {"mlp_bias": True}, "mlp_bias is True"),
    ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types must have 2 entries"),
    ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types contains chunked_attention"),
    ("qwen3", {"attention_bias": True}, "attention_bias is True"),
    ("gemma", {"attention_bias": True}, "attention_bias is True"),
    ("gemma2", {"attention_bias": True}, "attention_bias is True"),
    ("gemma3_text", {"attention_bias": True}, "attention_bias is True"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    ("gemma3_text", {"tie_word_embeddings": False}, "ties the embeddings"),
    ("gemma3_text", {"num_hidden_layers": 4, "layer_types": ["full_attention", *["sliding_attention"] * 3]},
     "must repeat"),
    ("phi3", {"attention_bias": True}, "attention_bias is True"),
    ("phi3", {"mlp_bias": True}, "mlp_bias is True"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
    ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1"),
    ("qwen3_moe", QWEN3_MOE | {"attention_bias": True}, "attention_bias is True"),
    ("qwen3_moe", QWEN3_MOE | {"decoder_sparse_step": 2}, "experts in all layers"),
    ("qwen3_moe", QWEN3_MOE | {"mlp_only_layers": [0]}, "experts in all layers"),
    ("gpt_oss", OSS | {"attention_bias": False}, "attention_bias is false"),
    ("gpt_oss", OSS | {"swiglu_limit": 6.0}, "swiglu_limit is 6.0"),
    ("gpt_oss", OSS | {"swiglu_alpha": 1.7}, "swiglu_alpha is 1.7"),
    ("gpt_oss", OSS | {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("gpt_oss", OSS | {"rope_scaling": None}, "has type 'default'"),
    ("gpt_oss", OSS | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "has type 'linear'"),
    ("gpt_oss", OSS | {"rope_scaling": YARN | {"attention_factor": 2.0}}, "attention_factor 2.0"),
    ("deepseek_v3", V3 | {"norm_topk_prob": False}, "norm_topk_prob is false"),
    ("deepseek_v3", V3 | {"rope_interleave": False}, "rope_interleave is false"),
    ("deepseek_v3", V3 | {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
    ("deepseek_v3", V3 | {"topk_method": "greedy"}, "topk_method is 'greedy'"),
    ("deepseek_v3", V3 | {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
    ("deepseek_v3", V3 | {"topk_group": 2}, "num_experts_per_tok 2 over topk_group 2 must be 2"),
    ("deepseek_v3", V3 | {"n_group": 1, "num_experts_per_tok": 1}, "num_experts_per_tok is 1"),
    ("deepseek_v3", V3 | {"attention_bias": True}, "attention_bias is True"),
    ("deepseek_v3", V3 | {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05"),
    ("deepseek_v3", V3 | {"num_key_value_heads": 2}, "latent attention has no query groups"),
    ("deepseek_v3", V3 | {"first_k_dense_replace": 2}, "none of 2 layers"),
    ("deepseek_v3", V3 | {"n_shared_experts": 0}, "n_shared_experts is 0"),
    ("deepseek_v3", V3 | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "has type 'linear'"),
    ("deepseek_v3", V3 | {"rope_scaling": YARN | {"attention_factor": 2.0}}, "computes its factors from mscale"),
    ("deepseek_v3", V3 | {"rope_scaling": YARN | {"truncate": False}}, "computes its factors from mscale"),
    ("deepseek_v3", V3 | {"rope_scaling": YARN | {"mscale_all_dim": 0.7}}, "computes its factors from mscale"),
    ("deepseek_v2", LATENT | {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
    ("deepseek_v2", LATENT | {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
    ("deepseek_v2", LATENT | {"mlp_bias": True}, "mlp_bias is True"),
    ("deepseek_v2", LATENT | {"norm_topk_prob": True}, "norm_topk_prob is true"),
    ("deepseek_v2", LATENT | {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
    ("deepseek_v2", LATENT | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1},
     "num_experts_per_tok 2 over topk_group 1 must be 1"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "keys", "says"), REFUSED)
def test_what_nemo_would_compute_otherwise_is_refused(kind, keys, says):
    with pytest.raises(UserError, match=re.escape(says)):
        read(kind, keys)


def test_one_group_is_not_held_to_what_groups_must_be():
    one = LATENT | {"topk_method": "group_limited_greedy", "n_group": 1, "topk_group": 1}
    assert read("deepseek_v2", one).fields["moe_router_num_groups"] is None


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "causal language model"),
        ({"quantization_config": {"quant_method": "fp8"}}, "the weights are in fp8"),
        ({"model_type": "olmo2"}, "its norms follow attention and MLP"),
        ({"model_type": "never_heard_of"}, "no class that computes it"),
        ({"model_type": None}, "cannot import model_type ''"),
    ],
)
def test_other_models_are_refused(keys, says):
    with pytest.raises(UserError, match=re.escape(says)):
        read("llama", keys)


def test_one_of_several_architectures_is_enough():
    assert read("llama", {"architectures": ["Own", "LlamaForCausalLM"]}).unknown == ()


def test_mxfp4_is_taken_of_gpt_oss_alone():
    packed = {"quantization_config": {"quant_method": "mxfp4"}}
    assert read("gpt_oss", OSS | packed).model == "GPTOSSModel"
    with pytest.raises(UserError, match="mxfp4"):
        read("llama", packed)


def test_keys_with_the_value_of_a_plain_model_are_no_matter():
    assert read("llama", {"vision_config": None, "is_encoder_decoder": False, "clip_qkv": None}).unknown == ()
