import json
import subprocess
import sys
from pathlib import Path

import pytest

from superpod.errors import UserError
from superpod.planner import models
from superpod.planner.formats.hf_families import FAMILIES
from superpod.planner.formats.hf_shape import from_config
from tests.planner import hf_folders

# What the config.json of each model says, cut to the keys that decide its shape.
CONFIGS = {
    "llama3_8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False,
    },
    "llama32_1b": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "mistral_7b": {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": 4096,
    },
    "mixtral_8x7b": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": None,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "qwen25_7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "sliding_window": 131072,
        "use_sliding_window": False, "tie_word_embeddings": False,
    },
    "qwen3_8b": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936,
    },
    "qwen3_30b_a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "gemma2_27b": {
        "model_type": "gemma2", "hidden_size": 4608, "intermediate_size": 36864, "num_hidden_layers": 46,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 256000,
        "sliding_window": 4096, "attention_bias": False,
    },
    "gemma3_27b": {
        "model_type": "gemma3", "text_config": {
            "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
            "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
        },
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1,
    },
    "deepseek_v2_lite": {
        "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2, "first_k_dense_replace": 1,
    },
    "gpt_oss_20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 201088,
        "sliding_window": 128,
        "num_local_experts": 32, "num_experts_per_tok": 4, "attention_bias": True,
    },
    "phi3_mini": {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064, "sliding_window": None,
    },
    "starcoder2_15b": {
        "model_type": "starcoder2", "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 40,
        "num_attention_heads": 48, "num_key_value_heads": 4, "vocab_size": 49152, "use_bias": True,
        "sliding_window": None, "tie_word_embeddings": False,
    },
    "nemotron3_4b": {
        "model_type": "nemotron", "hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 32,
        "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 256000,
    },
    "nemotron3_nano": {
        "model_type": "nemotron_h", "hidden_size": 2688, "intermediate_size": 1856, "num_hidden_layers": 52,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 131072,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "mamba_num_heads": 64,
        "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "n_routed_experts": 128,
        "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
        "tie_word_embeddings": False,
    },
    "qwen3.8_27b": {
        "model_type": "qwen3_5", "text_config": {
            "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
            "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
            "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        },
    },
}  # fmt: skip


def write(folder, config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder / "config.json"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_the_model_of_the_table(tmp_path, name):
    table = models.find(name)
    read = from_config(write(tmp_path / name, CONFIGS[name]), vocab_divisible_by=table.vocab_divisible_by)
    assert read.name == name
    assert read.total_parameters() == table.total_parameters()
    for seq in (512, 32768):
        assert read.flops_per_token(seq, causal=True) == table.flops_per_token(seq, causal=True)
    split = models.Split(tp=2, etp=1)
    assert read.parameters(split) == table.parameters(split)


def test_a_folder_will_do(tmp_path):
    write(tmp_path / "mine", CONFIGS["llama3_8b"])
    assert from_config(tmp_path / "mine").name == "mine"


LLAMA = CONFIGS["llama3_8b"]


@pytest.mark.parametrize(
    ("config", "says", "hint"),
    [
        (
            {**LLAMA, "model_type": "mamba3", "architectures": ["Mamba3ForCausalLM"], "state_size": 16},
            "Mamba3ForCausalLM.*Llama models have no key state_size",
            "recipes plan layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256 --gpu",
        ),
        ({**LLAMA, "model_type": "lama", "hidden_size": None}, "model_type 'lama'.*hidden_size is missing", "llama"),
        ({}, "no model_type", "known"),
        (
            {k: v for k, v in LLAMA.items() if k != "hidden_size"},
            "hidden_size is missing",
            "complete llama configuration",
        ),
        ({**LLAMA, "hidden_size": "4096"}, "hidden_size is '4096', not an integer from 1 to", "correct the file"),
        ({**LLAMA, "attention_bias": "yes"}, "attention_bias is 'yes', not true or false", ""),
        ({**LLAMA, "num_hidden_layers": -32}, "num_hidden_layers is -32, not an integer from 1 to", ""),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers is 0, not an integer from 1 to 10,000", ""),
        ({**LLAMA, "num_hidden_layers": True}, "num_hidden_layers is True, not an integer", ""),
        ({**LLAMA, "vocab_size": 32000.0}, "vocab_size is 32000.0, not an integer", ""),
        ({**LLAMA, "vocab_size": 10**30}, "vocab_size is 1000.*, not an integer from 1 to 10,000,000", ""),
        ({**LLAMA, "num_attention_heads": [32]}, r"num_attention_heads is \[32\], not an integer", ""),
        ({**LLAMA, "num_key_value_heads": 7}, "heads 32 must be divisible by kv_heads 7", ""),
        (
            {**LLAMA, "text_config": {"hidden_size": "9" * 5000}},
            "text_config: hidden_size is '999.*, not an integer",
            "",
        ),
        ({**CONFIGS["deepseek_v3"], "n_shared_experts": "x"}, "n_shared_experts", ""),
        (
            {**CONFIGS["qwen3_30b_a3b"], "mlp_only_layers": {"a": 1}},
            "mlp_only_layers is {'a': 1}, not a list of layers",
            "",
        ),
        ("[" * 100_000, "is not JSON", ""),
        ('{"model_type": "llama", "x": "' + "a" * 11_000_000 + '"}', "exceeds 10 MiB", ""),
        ({**CONFIGS["qwen3_30b_a3b"], "mlp_only_layers": [3]}, r"mlp_only_layers \[3\]", "dense_first"),
        ({**CONFIGS["deepseek_v3"], "moe_intermediate_size": None}, "moe_intermediate_size is missing", ""),
        ("[1]", "does not contain a JSON object", "a Hugging Face config.json"),
        ("{", "is not JSON", ""),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(tmp_path, config, says, hint):
    path = write(tmp_path / "broken", config)
    with pytest.raises(UserError, match=says) as refused:
        from_config(path)
    assert hint in refused.value.hint


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.json does not exist") as refused:
        from_config(tmp_path / "nothing.json")
    assert refused.value.hint == "pass a Hugging Face config.json, or the folder that contains it"


# The proof: small models of each family, built by transformers itself.
SMALL = {
    "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 1000,
}  # fmt: skip
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
LATENT = {
    **ROUTED,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 8,
    "n_group": 1,
    "topk_group": 1,
}
DELTA = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "shared_expert_intermediate_size": 128,
}  # fmt: skip
BUILT = {
    **{kind: {} for kind in ("llama", "mistral", "mixtral", "qwen2", "qwen3", "starcoder2", "nemotron")},
    **{kind: {"head_dim": 64} for kind in ("gemma", "gemma2", "gemma3_text")},
    "phi3": {"pad_token_id": 0},
    "qwen3_moe": {**ROUTED, "num_experts": 8, "mlp_only_layers": [0]},
    "qwen3_next": {**ROUTED, **DELTA, "num_experts": 8, "head_dim": 64},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "gpt_oss": {"num_local_experts": 8, "head_dim": 32},
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 640, "interleave_moe_layer_step": 2},
    "gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 128},
}

BUILD = """
import json, sys, torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
out = {}
for kind, keys in json.loads(sys.argv[1]).items():
    config = CONFIG_MAPPING[kind](**keys)
    with torch.device("meta"):
        out[kind] = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    config.save_pretrained(sys.argv[2] + "/" + kind)
print("RESULT" + json.dumps(out))
"""


@pytest.mark.nemo
@pytest.mark.slow
def test_counts_equal_transformers_own_models(tmp_path):
    configs = {kind: {**({} if kind == "gpt2" else SMALL), **keys} for kind, keys in BUILT.items()}
    command = [sys.executable, "-W", "ignore", "-c", BUILD, json.dumps(configs), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    real = json.loads(done.stdout.rpartition("RESULT")[2])
    assert {kind: from_config(Path(tmp_path) / kind).total_parameters() for kind in BUILT} == real


def test_an_architecture_that_is_not_known_is_planned_where_its_keys_are_a_llamas(tmp_path):
    llama = from_config(write(tmp_path / "a", LLAMA))
    other = from_config(write(tmp_path / "b", {**LLAMA, "model_type": "orion", "rms_norm_eps": 1e-5}))
    assert other.total_parameters() == llama.total_parameters()
    assert llama.approximate == ""
    assert other.approximate.startswith("model_type 'orion' is unknown: planned as a Llama")


def test_of_a_model_that_sees_the_text_part_is_planned_and_that_is_said(tmp_path):
    config = {"model_type": "mistral3", "text_config": CONFIGS["mistral_7b"], "vision_config": {"hidden_size": 64}}
    shape = from_config(write(tmp_path / "sees", config))
    assert shape.total_parameters() == models.find("mistral_7b").total_parameters()
    assert shape.approximate == "text decoder only, without the vision part"


def test_a_link_that_leads_to_itself_is_named(tmp_path):
    (tmp_path / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(UserError, match="cannot be read"):
        from_config(tmp_path)


def test_every_family_is_tried():
    tried = {config["model_type"] for config in CONFIGS.values()} | set(BUILT) | set(hf_folders.KINDS)
    alike = {"llama4", "kimi_k2", "glm_moe_dsa", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"}
    assert set(FAMILIES) == tried | alike | set(hf_folders.FROM_THE_HUB)
