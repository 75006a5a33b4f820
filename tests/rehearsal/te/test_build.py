"""What Transformer Engine's own Python refuses, and what it builds, for GPUs that are not here."""

import pytest

from superpod.nemo2.options import OPTIONS

pytestmark = [pytest.mark.nemo, pytest.mark.slow]

BUILT = (
    "llama3_8b_pretrain_a100_bf16",
    "llama3_8b_pretrain_h100_fp8ds",
    "llama3_8b_pretrain_h100_fp8cs",
    "llama3_8b_pretrain_h100_fp8bw",
    "llama3_8b_pretrain_b200_mxfp8",
    "llama3_70b_pretrain_h100_bf16",
    "llama3_70b_pretrain_b300_mxfp8",
    "mixtral_8x7b_pretrain_h100_fp8ds",
    "qwen3_30b_a3b_pretrain_b200_mxfp8",
    "deepseek_v2_lite_pretrain_h100_bf16",
    "gpt_oss_20b_pretrain_b200_mxfp8",
    "gpt3_175b_pretrain_h100_bf16",
    "gpt3_175b_pretrain_a100_bf16",  # heads of 128 without rotation: flash attention takes them apart by a kernel
    "nemotronh_8b_pretrain_h100_fp8cs",
    "mamba2_130m_pretrain_h100_bf16",
    "starcoder2_15b_pretrain_h100_bf16",
)


@pytest.mark.parametrize("recipe", BUILT)
def test_parameters_with_te_layers_are_the_planners(with_te, recipe):
    built = with_te(recipe=recipe)
    assert "refused" not in built, built["refused"]
    assert built["parameters"] == built["planned"]


def test_generations_and_formats_are_different_layer_configurations(with_te):
    hopper = with_te(recipe="llama3_8b_pretrain_h100_bf16")["layers"]
    assert hopper == with_te(recipe="llama3_8b_pretrain_h100_bf16")["layers"]
    blackwell = with_te(recipe="llama3_8b_pretrain_h100_bf16", generation="sm100")["layers"]
    fp8 = with_te(recipe="llama3_8b_pretrain_h100_fp8ds")["layers"]
    assert not set(hopper) & set(blackwell) | set(hopper) & set(fp8)


def test_userbuffers_without_multicast_need_their_variable(with_te):
    recipe = "llama3_70b_pretrain_a100_bf16"
    assert "refused" not in with_te(recipe=recipe)
    assert "UB_SKIPMC=1" in with_te(recipe=recipe, without=["UB_SKIPMC"])["refused"]


def test_latent_attention_on_ampere_has_no_kernel(with_te):
    assert with_te(recipe="deepseek_v2_lite_pretrain_h100_bf16")["attention"] == ["fused"]
    assert with_te(recipe="deepseek_v2_lite_pretrain_a100_bf16")["attention"] == ["unfused"]


def test_attention_is_chosen_for_each_gpu_whatever_was_built_before(with_te):
    """Transformer Engine keeps its last choice for inputs that are alike, and the GPU is none of them."""
    recipe = "llama2_7b_lora_a100_bf16"
    alone, hopper, again = (with_te(recipe=recipe, generation=sm)["attention"] for sm in ("sm80", "sm90", "sm80"))
    assert (alone, hopper, again) == (["flash"], ["fused"], ["flash"])


def test_learned_softmax_has_no_backend_across_ring_attention(with_te):
    ring = {"trainer.strategy.context_parallel_size": 2, "model.config.cp_comm_type": "p2p"}
    assert "refused" in with_te(recipe="gpt_oss_20b_pretrain_b200_bf16", set=ring)


def test_fp8_refuses_widths_that_are_no_multiples(with_te):
    odd = {"model.config.ffn_hidden_size": 14_344}
    assert "refused" not in with_te(recipe="llama3_8b_pretrain_h100_bf16", set=odd)["parameters"]
    assert "must be a multiple of 16" in with_te(recipe="llama3_8b_pretrain_h100_fp8bw", set=odd)["refused"]
    odd = {"model.config.ffn_hidden_size": 14_352}
    assert "divisible by 32" in with_te(recipe="llama3_8b_pretrain_b200_mxfp8", set=odd)["refused"]


def test_the_routers_jitter_draws_from_bounds_without_values(with_te):
    jitter = {"model.config.moe_input_jitter_eps": 0.01, "model.config.moe_z_loss_coeff": 1e-3}
    built = with_te(recipe="mixtral_8x7b_pretrain_h100_bf16", set=jitter)
    assert "refused" not in built, built["refused"]


def test_ampere_has_no_fp8_and_hopper_no_mxfp8(with_te):
    assert "compute capability" in with_te(recipe="llama3_8b_lora_h100_fp8ds", generation="sm80")["refused"]
    assert "refused" in with_te(recipe="llama3_8b_pretrain_b200_mxfp8", generation="sm90")


def test_packed_samples_take_attention_by_their_ends(with_te):
    assert "refused" not in with_te(recipe="llama3_70b_sft_h100_bf16", packed=True)
    padded_on_ampere = with_te(recipe="mixtral_8x7b_sft_a100_bf16", packed=True)
    assert "No dot product attention backend" in padded_on_ampere["refused"]


@pytest.mark.parametrize("model", ["llama3_8b_sft", "deepseek_v2_lite_sft", "chatglm3_6b_lora", "llama4_scout_sft"])
def test_a_pack_is_a_micro_batch_in_one_sequence_whose_ends_are_read(with_te, model):
    """Userbuffers are made for it, and rotary embeddings are cut at its samples' ends."""
    built = with_te(recipe=f"{model}_h100_bf16", packed=True)
    assert "refused" not in built, built["refused"]


def test_gemma_3s_attention_does_not_take_what_megatrons_layer_gives_it(with_te):
    refused = with_te(recipe="gemma3_1b_pretrain_h100_bf16").get("refused", "")
    assert "rotary_pos_cos_sin" in refused


def test_a_function_without_a_stand_in_says_its_name():
    from superpod.rehearsal.te.compiled.extension import AbsentKernelError, Extension

    with pytest.raises(AbsentKernelError, match="swizzle_scales"):
        Extension().swizzle_scales()


def test_gpt_oss_with_nemos_own_activation_is_refused_by_megatron(with_te):
    plain = with_te(recipe="gpt_oss_20b_pretrain_h100_bf16", unset=["model.config.activation_func"])
    assert "activation function should be" in plain["refused"]


def test_gpt3_with_nemos_own_layer_is_not_there(with_te):
    whole = {"model.config.use_transformer_engine_full_layer_spec": True}
    assert "nemo.collections.nlp" in with_te(recipe="gpt3_175b_pretrain_h100_bf16", set=whole)["refused"]


OTHERS = {"alltoall": "deepseek_v2_lite_pretrain_h100_bf16"}
"""Recipes for options that llama3_8b's cannot have."""


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_builds(with_te, option):
    """As on a GPU: CUDA graphs with Transformer Engine's random states, activations that go to the host."""
    built = with_te(recipe=OTHERS.get(option, "llama3_8b_pretrain_h100_bf16"), overrides=[f"with={option}"])
    assert "refused" not in built, built["refused"]
    assert built["parameters"] == built["planned"]


def test_the_field_that_nemo_checks_twice_is_refused(with_te):
    fields = ["model.config.enable_cuda_graph=True", "trainer.strategy.use_te_rng_tracker=True"]
    twice = with_te(recipe="llama3_8b_pretrain_h100_bf16", overrides=fields)
    assert "with cuda_graph_impl" in twice["refused"]


def test_cuda_graphs_need_random_states_that_they_can_hold(with_te):
    plain = with_te(recipe="llama3_8b_pretrain_h100_bf16", overrides=["model.config.cuda_graph_impl=local"])
    assert "RNG tracker does not support cudagraphs" in plain["refused"]
