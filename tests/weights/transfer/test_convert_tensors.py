"""Tensors between Megatron and transformers: in every layout of experts, with an account of both sides."""

from types import SimpleNamespace
from typing import Any

import pytest

from superpod.errors import UserError
from superpod.weights.transfer import convert_tensors, mapping

pytest.importorskip("torch", reason="torch: [nemo] extra")
HEADS, GROUPS, CHANNELS, HIDDEN, FFN, EXPERTS = 4, 2, 3, 10, 6, 3
CONFIG = SimpleNamespace(
    num_attention_heads=HEADS,
    num_query_groups=GROUPS,
    kv_channels=CHANNELS,
    num_moe_experts=EXPERTS,
    hidden_size=HIDDEN,
    share_embeddings_and_output_weights=False,
)
LAYER = "decoder.layers.0."
QKV = f"{LAYER}self_attention.linear_qkv.weight"
EMBEDDING = "embedding.word_embeddings.weight"


def model(shapes):
    """A module with parameters of these names and shapes, on no device."""
    import torch

    root = torch.nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, torch.nn.Parameter(torch.empty(shape, device="meta")))
    return root


def drawn(shapes):
    import torch

    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


ATTENTION = {
    "model.embed_tokens.weight": (11, HIDDEN),
    "model.layers.0.self_attn.q_proj.weight": (HEADS * CHANNELS, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (GROUPS * CHANNELS, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (GROUPS * CHANNELS, HIDDEN),
}
CORE = {EMBEDDING: (11, HIDDEN), QKV: ((HEADS + 2 * GROUPS) * CHANNELS, HIDDEN)}


def test_a_group_has_its_queries_then_its_key_then_its_value():
    import torch

    source, core = drawn(ATTENTION), model(CORE)
    convert_tensors.load_into_megatron(source, core, CONFIG, "qwen2")
    whole = dict(core.named_parameters())[QKV].reshape(GROUPS, HEADS // GROUPS + 2, CHANNELS, HIDDEN)
    second_key = source["model.layers.0.self_attn.k_proj.weight"][CHANNELS:]
    assert torch.equal(whole[1, 2], second_key)
    assert torch.equal(whole[1, :2].flatten(0, 1), source["model.layers.0.self_attn.q_proj.weight"][2 * CHANNELS :])


def test_tensors_that_have_no_place_are_named():
    extra = {**ATTENTION, "model.layers.0.self_attn.o_proj.bias": (HIDDEN,)}
    with pytest.raises(UserError, match=r"no counterpart for model.layers.0.self_attn.o_proj.bias"):
        convert_tensors.load_into_megatron(drawn(extra), model(CORE), CONFIG, "llama")


def test_tensors_that_nothing_sets_are_named():
    less = {name: shape for name, shape in ATTENTION.items() if "k_proj" not in name}
    with pytest.raises(UserError, match=r"has no model.layers.0.self_attn.k_proj.weight"):
        convert_tensors.load_into_megatron(drawn(less), model(CORE), CONFIG, "llama")
    with pytest.raises(UserError, match=r"llama has no counterpart for decoder.layers.0.self_attention.gate"):
        convert_tensors.load_into_megatron(
            drawn(ATTENTION), model({**CORE, f"{LAYER}self_attention.gate": (1,)}), CONFIG, "llama"
        )


def test_an_export_sets_all_that_transformers_expects():
    state = drawn(CORE)
    expected = drawn({**ATTENTION, "lm_head.weight": (11, HIDDEN)})
    made = convert_tensors.from_megatron(state, CONFIG, "llama", expected, is_tied=False)
    assert made.keys() == expected.keys()
    biased = {**expected, "model.layers.0.self_attn.q_proj.bias": state[EMBEDDING]}
    with pytest.raises(UserError, match=r"NeMo's model has no counterpart for model.layers.0.self_attn.q_proj.bias"):
        convert_tensors.from_megatron(state, CONFIG, "llama", biased, is_tied=False)
    fewer = {name: tensor for name, tensor in expected.items() if "v_proj" not in name}
    with pytest.raises(UserError, match=r"has no counterpart for model.layers.0.self_attn.v_proj.weight"):
        convert_tensors.from_megatron(state, CONFIG, "llama", fewer, is_tied=False)


EXPERT = f"{LAYER}mlp.experts."
LAYOUTS = {
    "one GEMM each": [f"local_experts.{e}.linear_fc{n}.weight" for e in range(EXPERTS) for n in (1, 2)],
    "Transformer Engine's grouped": [f"linear_fc{n}.weight{e}" for e in range(EXPERTS) for n in (1, 2)],
    "Megatron's grouped": ["weight1", "weight2"],
}
SHAPES = {"weight1": (HIDDEN, EXPERTS * 2 * FFN), "weight2": (EXPERTS * FFN, HIDDEN)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_of_every_layout_go_there_and_back(kind, layout):
    import torch

    shapes = {
        EXPERT + name: SHAPES.get(name, (2 * FFN, HIDDEN) if "fc1" in name else (HIDDEN, FFN))
        for name in LAYOUTS[layout]
    }
    state = drawn(shapes)
    table = mapping.build_rules(state, CONFIG, kind)
    made = {}
    for name, rule in table.items():
        made |= dict(zip(rule.pieces, rule.split(state[name]), strict=True))
    for name, rule in table.items():
        assert torch.equal(rule.join([made[piece] for piece in rule.pieces]), state[name])
    first = mapping.build_rules([f"{EXPERT}local_experts.1.linear_fc1.weight"], CONFIG, kind).popitem()[1]
    of_second = first.join([made[piece] for piece in first.pieces])  # [2 FFN, HIDDEN], whatever the layout
    if layout == "Megatron's grouped":  # megatron/core/transformer/moe/experts.py, GroupedMLP.forward
        assert torch.equal(of_second, state[f"{EXPERT}weight1"].view(EXPERTS, HIDDEN, -1)[1].t())


def test_an_expert_that_is_left_over_is_named():
    names = {f"{EXPERT}local_experts.{e}.linear_fc1.weight": (2 * FFN, HIDDEN) for e in range(EXPERTS - 1)}
    source = {"model.layers.0.mlp.experts.gate_up_proj": (EXPERTS, HIDDEN, 2 * FFN)}
    with pytest.raises(UserError, match=r"no counterpart for model.layers.0.mlp.experts.gate_up_proj\[2\]"):
        convert_tensors.load_into_megatron(drawn(source), model(names), CONFIG, "gpt_oss")


def nan(shapes, name):
    tensors = drawn(shapes)
    tensors[name].view(-1)[0] = float("nan")
    return tensors


def test_numbers_that_are_none_go_nowhere():
    key = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(UserError, match="contains NaN or infinity"):
        convert_tensors.load_into_megatron(nan(ATTENTION, key), model(CORE), CONFIG, "llama")
    expected = drawn({**ATTENTION, "lm_head.weight": (11, HIDDEN)})
    with pytest.raises(UserError, match="contains NaN or infinity"):
        convert_tensors.from_megatron(nan(CORE, QKV), CONFIG, "llama", expected, is_tied=False)


def test_another_shape_is_named_with_both():
    wide = {**ATTENTION, "model.embed_tokens.weight": (12, HIDDEN)}
    with pytest.raises(
        UserError,
        match=r"embed_tokens.weight \[12, 10\] is converted to shape \[12, 10\], but NeMo's .* has shape \[11, 10\]",
    ):
        convert_tensors.load_into_megatron(drawn(wide), model(CORE), CONFIG, "llama")
    expected = drawn({**wide, "lm_head.weight": (11, HIDDEN)})
    with pytest.raises(UserError, match=r"would be \[11, 10\], but in the Hugging Face model it is \[12, 10\]"):
        convert_tensors.from_megatron(drawn(CORE), CONFIG, "llama", expected, is_tied=False)


def test_a_tied_output_matrix_is_left_out_only_where_it_is_the_embedding():
    import torch

    core = {**CORE, "output_layer.weight": (11, HIDDEN)}
    state = drawn(core)
    with pytest.raises(UserError, match="differs from the embedding"):
        convert_tensors.from_megatron(state, CONFIG, "llama", drawn(ATTENTION), is_tied=True)
    state["output_layer.weight"] = state[EMBEDDING].clone()
    assert (
        convert_tensors.from_megatron(state, CONFIG, "llama", drawn(ATTENTION), is_tied=True).keys() == ATTENTION.keys()
    )
    with pytest.raises(UserError, match=r"no counterpart for lm_head.weight"):
        convert_tensors.from_megatron(state, CONFIG, "llama", drawn(ATTENTION), is_tied=False)
    both = drawn({**ATTENTION, "lm_head.weight": (11, HIDDEN)})
    tied = SimpleNamespace(**{**vars(CONFIG), "share_embeddings_and_output_weights": True})
    convert_tensors.load_into_megatron(both, model(CORE), tied, "llama")
    with pytest.raises(UserError, match=r"no counterpart for lm_head.weight"):
        convert_tensors.load_into_megatron(both, model(CORE), CONFIG, "llama")
    head = convert_tensors.from_megatron(drawn(CORE), CONFIG, "llama", both, is_tied=False)["lm_head.weight"]
    assert torch.equal(head, drawn(CORE)[EMBEDDING])


def test_parameters_keep_their_marks_and_their_number_format():
    import torch

    core = model(CORE)
    matrix: Any = core.get_parameter(QKV)
    matrix.data, matrix.tensor_model_parallel = matrix.data.to(torch.bfloat16), True
    matrix.requires_grad = False
    convert_tensors.load_into_megatron(drawn(ATTENTION), core, CONFIG, "llama")
    new: Any = core.get_parameter(QKV)
    assert (new.dtype, new.tensor_model_parallel, new.requires_grad) == (torch.bfloat16, True, False)
    assert core.get_parameter(EMBEDDING).requires_grad


def test_saved_buffers_go_along_and_others_do_not():
    import torch

    name = f"{LAYER}mlp.router.expert_bias"
    core = model({**CORE, f"{LAYER}mlp.router.weight": (EXPERTS, HIDDEN)})
    router = core.get_submodule(f"{LAYER}mlp.router")
    router.register_buffer("expert_bias", torch.zeros(EXPERTS))
    router.register_buffer("local_tokens_per_expert", torch.zeros(EXPERTS), persistent=False)
    core.register_buffer("counted", None)
    assert set(convert_tensors.get_tensor_names(core)) == {*CORE, f"{LAYER}mlp.router.weight", name}
    gate = "model.layers.0.mlp.gate."
    source = drawn({f"{gate}weight": (EXPERTS, HIDDEN), f"{gate}e_score_correction_bias": (EXPERTS,)})
    small = model({f"{LAYER}mlp.router.weight": (EXPERTS, HIDDEN)})
    small.get_submodule(f"{LAYER}mlp.router").register_buffer("expert_bias", torch.zeros(EXPERTS))
    convert_tensors.load_into_megatron(source, small, CONFIG, "deepseek_v3")
    assert torch.equal(small.get_buffer(name), source[f"{gate}e_score_correction_bias"])
    assert convert_tensors.get_tensors(small).keys() == {f"{LAYER}mlp.router.weight", name}


def test_tied_parameters_are_listed_under_every_name():
    import torch

    both = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    both[1].weight = both[0].weight
    assert convert_tensors.get_tensors(both).keys() == {"0.weight", "1.weight"}


def test_experts_of_one_tensor_are_stacked_in_their_order():
    import torch

    names = {f"{EXPERT}linear_fc2.weight{e}": (HIDDEN, FFN) for e in (1, 0, 2)}
    state = drawn({**names, EMBEDDING: (11, HIDDEN)})
    down = "model.layers.0.mlp.experts.down_proj"
    expected = {down: torch.empty(EXPERTS, FFN, HIDDEN), "model.embed_tokens.weight": torch.empty(11, HIDDEN)}
    made = convert_tensors.from_megatron(state, CONFIG, "gpt_oss", expected, is_tied=True)
    assert torch.equal(made[down][2], state[f"{EXPERT}linear_fc2.weight2"].t())


@pytest.mark.parametrize(("count", "says"), [(6, "n5$"), (8, "n5 and 2 more$")])
def test_a_message_lists_six_names(count, says):
    extra = {**ATTENTION, **{f"n{number}": (1,) for number in range(count)}}
    with pytest.raises(UserError, match=says):
        convert_tensors.load_into_megatron(drawn(extra), model(CORE), CONFIG, "llama")
