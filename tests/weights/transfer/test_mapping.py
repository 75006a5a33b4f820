"""Names and row orders of Megatron's tensors in transformers' state dicts, as both sides' modeling files have them."""

from types import SimpleNamespace

import pytest

from superpod.weights.transfer import mapping

torch = pytest.importorskip("torch", reason="torch: [nemo] extra")
CONFIG = SimpleNamespace(
    num_attention_heads=4, num_query_groups=2, kv_channels=1, num_moe_experts=2, hidden_size=3,
    share_embeddings_and_output_weights=False,
)  # fmt: skip
ATTENTION, MLP = "self_attention.", "mlp."
QKV = f"{ATTENTION}linear_qkv."


@pytest.mark.parametrize(
    ("kind", "local", "names"),
    [
        ("llama", f"{QKV}weight", ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"]),
        ("qwen2", f"{QKV}bias", ["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"]),
        ("phi3", f"{QKV}weight", ["self_attn.qkv_proj.weight"]),
        ("llama", f"{QKV}layer_norm_weight", ["input_layernorm.weight"]),
        ("llama", f"{ATTENTION}linear_proj.weight", ["self_attn.o_proj.weight"]),
        ("gpt_oss", f"{ATTENTION}core_attention.softmax_offset", ["self_attn.sinks"]),
        ("llama", f"{MLP}linear_fc1.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
        ("llama", f"{MLP}linear_fc2.bias", ["mlp.down_proj.bias"]),
        ("llama", f"{MLP}linear_fc1.layer_norm_weight", ["post_attention_layernorm.weight"]),
        ("phi3", f"{MLP}linear_fc1.weight", ["mlp.gate_up_proj.weight"]),
        ("nemotron", f"{MLP}linear_fc1.weight", ["mlp.up_proj.weight"]),
        ("starcoder2", f"{MLP}linear_fc1.weight", ["mlp.c_fc.weight"]),
        ("starcoder2", f"{MLP}linear_fc2.bias", ["mlp.c_proj.bias"]),
        ("gemma2", f"{MLP}linear_fc1.layer_norm_weight", ["pre_feedforward_layernorm.weight"]),
        ("gemma2", f"{ATTENTION}linear_proj.post_layernorm.weight", ["post_attention_layernorm.weight"]),
        ("qwen3", f"{ATTENTION}k_layernorm.weight", ["self_attn.k_norm.weight"]),
        ("deepseek_v3", f"{ATTENTION}linear_kv_down_proj.weight", ["self_attn.kv_a_proj_with_mqa.weight"]),
        ("deepseek_v3", f"{MLP}router.expert_bias", ["mlp.gate.e_score_correction_bias"]),
        ("deepseek_v3", f"{MLP}shared_experts.linear_fc1.weight",
         ["mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"]),
        ("deepseek_v3", f"{MLP}shared_experts.linear_fc2.weight", ["mlp.shared_experts.down_proj.weight"]),
        ("mixtral", f"{MLP}router.weight", ["block_sparse_moe.gate.weight"]),
        ("qwen3_moe", f"{MLP}router.weight", ["mlp.gate.weight"]),
        ("gpt_oss", f"{MLP}router.bias", ["mlp.router.bias"]),
        ("mixtral", f"{MLP}experts.linear_fc1.weight3",
         ["block_sparse_moe.experts.3.w1.weight", "block_sparse_moe.experts.3.w3.weight"]),
        ("mixtral", f"{MLP}experts.local_experts.3.linear_fc2.weight", ["block_sparse_moe.experts.3.w2.weight"]),
        ("qwen3_moe", f"{MLP}experts.linear_fc1.weight3",
         ["mlp.experts.3.gate_proj.weight", "mlp.experts.3.up_proj.weight"]),
        ("qwen3_moe", f"{MLP}experts.weight2", ["mlp.experts.0.down_proj.weight", "mlp.experts.1.down_proj.weight"]),
        ("gpt_oss", f"{MLP}experts.linear_fc1.weight3", ["mlp.experts.gate_up_proj"]),
        ("gpt_oss", f"{MLP}experts.linear_fc2.bias3", ["mlp.experts.down_proj_bias"]),
    ],
)  # fmt: skip
def test_a_layers_tensor_has_these_names(kind, local, names):
    name = f"decoder.layers.7.{local}"
    [rule] = mapping.build_rules([name], CONFIG, kind).values()
    assert [piece.name for piece in rule.pieces] == [f"model.layers.7.{part}" for part in names]


def test_the_tensors_outside_of_layers():
    names = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight"}
    names |= {f"decoder.final_layernorm.{what}": f"model.norm.{what}" for what in ("weight", "bias")}
    assert {name: rule.pieces[0].name for name, rule in mapping.build_rules(names, CONFIG, "llama").items()} == names


@pytest.mark.parametrize(
    "name",
    ["decoder.layers.0.self_attention.linear_q.weight", "decoder.layers.0.self_attention.linear_qkv.scale",
     "decoder.layers.0.mlp.linear_fc3.weight", "decoder.layers.0.mlp.experts.linear_fc1.weight",
     "decoder.layers.0.mlp.experts.weight3", "encoder.layers.0.mlp.router.weight", "position_embeddings.weight",
     "decoder.layers.0.mlp.gate.weight"],
)  # fmt: skip
def test_a_tensor_without_a_counterpart_is_named(name):
    with pytest.raises(mapping.UnmappedError, match=name):
        mapping.build_rules(["output_layer.weight", name], CONFIG, "llama")


def column(*rows):
    return torch.tensor([[float(row)] for row in rows])


def numbers(tensor):
    return tensor.flatten().int().tolist()


def test_queries_keys_and_values_are_interleaved_by_group():
    """Four queries in two groups: q0 q1 k0 v0, q2 q3 k1 v1 (Megatron, attention.py, get_query_key_value_tensors)."""
    [rule] = mapping.build_rules([f"decoder.layers.0.{QKV}weight"], CONFIG, "llama").values()
    parts = [column(0, 1, 2, 3), column(10, 11), column(20, 21)]
    whole = rule.join(parts)
    assert numbers(whole) == [0, 1, 10, 20, 2, 3, 11, 21]
    assert [numbers(part) for part in rule.split(whole)] == [numbers(part) for part in parts]


def test_phi3_has_the_three_in_one_tensor_one_after_the_other():
    [rule] = mapping.build_rules([f"decoder.layers.0.{QKV}weight"], CONFIG, "phi3").values()
    whole = rule.join([column(0, 1, 2, 3, 10, 11, 20, 21)])
    assert numbers(whole) == [0, 1, 10, 20, 2, 3, 11, 21]
    assert [numbers(part) for part in rule.split(whole)] == [[0, 1, 2, 3, 10, 11, 20, 21]]


def test_heads_of_several_channels_stay_whole():
    join, split = mapping.build_qkv_functions(2, 1, 2)
    whole = join([column(0, 1, 2, 3), column(10, 11), column(20, 21)])
    assert numbers(whole) == [0, 1, 2, 3, 10, 11, 20, 21]
    assert [numbers(part) for part in split(whole)] == [[0, 1, 2, 3], [10, 11], [20, 21]]


def test_a_bias_is_interleaved_as_its_matrix_is():
    join, split = mapping.build_qkv_functions(4, 2, 1)
    whole = join([torch.arange(4.0), torch.tensor([10.0, 11]), torch.tensor([20.0, 21])])
    assert numbers(whole) == [0, 1, 10, 20, 2, 3, 11, 21]
    assert numbers(split(whole)[1]) == [10, 11]


def test_the_gate_stands_before_the_up_projection():
    [rule] = mapping.build_rules(["decoder.layers.0.mlp.linear_fc1.weight"], CONFIG, "llama").values()
    assert numbers(rule.join([column(1, 2), column(3, 4)])) == [1, 2, 3, 4]
    assert [numbers(part) for part in rule.split(column(1, 2, 3, 4))] == [[1, 2], [3, 4]]


def test_gpt_oss_alternates_gate_and_up_and_transposes():
    """modeling_gpt_oss.py, GptOssExperts: gate_up[..., ::2] is the gate, [..., 1::2] the up projection."""
    prefix = "decoder.layers.0.mlp.experts.linear_fc"
    names = [f"{prefix}1.weight1", f"{prefix}1.bias1", f"{prefix}2.weight1", f"{prefix}2.bias1"]
    weight, bias, down, down_bias = (mapping.build_rules([name], CONFIG, "gpt_oss")[name] for name in names)
    theirs = torch.tensor([[1.0, 11, 2, 12], [3, 13, 4, 14]])  # [in 2, gate and up of 2]
    ours = weight.join([theirs])
    assert ours.tolist() == [[1, 3], [2, 4], [11, 13], [12, 14]]
    assert torch.equal(weight.split(ours)[0], theirs)
    assert numbers(bias.join([torch.tensor([1.0, 11, 2, 12])])) == [1, 2, 11, 12]
    assert numbers(bias.split(torch.tensor([1.0, 2, 11, 12]))[0]) == [1, 11, 2, 12]
    assert down.join([theirs]).tolist() == theirs.t().tolist()
    assert down.split(theirs.t())[0].tolist() == theirs.tolist()
    assert numbers(down_bias.join([torch.tensor([1.0, 2])])) == numbers(down_bias.split(torch.tensor([1.0, 2]))[0])
    assert weight.pieces == (mapping.Piece("model.layers.0.mlp.experts.gate_up_proj", 1),)


def test_megatrons_grouped_experts_are_transposed_and_side_by_side():
    """experts.py, GroupedMLP: weight1 [hidden, experts x 2 ffn], weight2 [experts x ffn, hidden]."""
    prefix = "decoder.layers.0.mlp.experts."
    first, second = mapping.build_rules([f"{prefix}weight1", f"{prefix}weight2"], CONFIG, "mixtral").values()
    gates = [torch.arange(3.0).reshape(1, 3) + 10 * place for place in range(4)]  # w1 and w3 of two experts
    whole = first.join(gates)
    assert whole.shape == (3, 4)
    assert [numbers(part) for part in first.split(whole)] == [numbers(gate) for gate in gates]
    assert numbers(whole.reshape(2, 3, 2)[1, :, 0]) == [20, 21, 22]  # the gate of the second expert
    downs = [torch.arange(3.0).reshape(3, 1) + 10 * place for place in range(2)]
    assert second.join(downs).tolist() == [[0, 1, 2], [10, 11, 12]]
    assert [numbers(part) for part in second.split(second.join(downs))] == [[0, 1, 2], [10, 11, 12]]


def test_only_eight_tensors_are_named():
    names = [f"decoder.layers.{layer}.gate" for layer in range(9)]
    with pytest.raises(mapping.UnmappedError, match=r"layers\.7\.gate$"):
        mapping.build_rules(names, CONFIG, "llama")
