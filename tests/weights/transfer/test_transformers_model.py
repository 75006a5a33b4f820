"""The transformers side of a conversion on a tiny Llama: what a folder must hold, and what is written."""

import json
from types import SimpleNamespace

import pytest

from superpod.errors import UserError
from superpod.weights.transfer import transformers_model
from tests.weights.tiny import changed, rewritten

torch = pytest.importorskip("torch", reason="torch: [nemo] extra")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, while its models are imported
UP = "model.layers.1.mlp.up_proj.weight"


def test_a_whole_folder_is_loaded_in_its_own_format_with_eager_attention(whole):
    model, notes = transformers_model.load_reference(whole)
    assert notes == []
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "eager"


def test_a_missing_tensor_is_refused_and_not_drawn_at_random(folder):
    rewritten(folder, lambda t: {name: tensor for name, tensor in t.items() if name != UP})
    with pytest.raises(UserError, match=f"lacks {UP}, which transformers would initialize randomly"):
        transformers_model.load_reference(folder)


def test_a_tensor_too_many_is_refused_but_not_what_the_configuration_gives(folder):
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    rewritten(folder, lambda t: t | frequencies)
    assert transformers_model.load_reference(folder)[1] == []
    rewritten(folder, lambda t: t | {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)})
    with pytest.raises(UserError, match=r"contains model\.layers\.0\.self_attn\.q_norm\.weight, which the llama"):
        transformers_model.load_reference(folder)


def test_another_shape_is_refused(folder):
    rewritten(folder, lambda t: t | {UP: t[UP][:-1].clone()})
    with pytest.raises(UserError, match=f"{UP}|transformers cannot read"):
        transformers_model.load_reference(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_transformers_cannot_read_is_refused(folder, name):
    changed(folder, num_hidden_layers="two") if name == "config.json" else (folder / name).write_bytes(bytes(99))
    with pytest.raises(UserError):
        transformers_model.load_reference(folder)


@pytest.mark.parametrize(
    ("tied", "alike", "refused"), [(True, False, True), (True, True, False), (False, False, False)]
)
@pytest.mark.parametrize("binary", [False, True])
def test_an_output_matrix_that_a_tied_model_would_lose_is_refused(folder, tied, alike, refused, binary):
    changed(folder, tie_word_embeddings=tied)
    if alike:
        rewritten(folder, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    if binary:
        from safetensors.torch import load_file

        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    if refused:
        with pytest.raises(UserError, match=r"lm_head\.weight differs from the embedding"):
            transformers_model.load_reference(folder)
    else:
        transformers_model.load_reference(folder)


@pytest.mark.parametrize(
    ("name", "layer"),
    [("model.layers.61.x", 61), ("model.layers.x.1", -1), ("model.norm.weight", -1), ("layers.1.2", -1)],
)
def test_the_layer_of_a_tensor(name, layer):
    assert transformers_model._parse_layer_number(name) == layer


def test_newer_keys_are_read_as_older_ones(folder):
    changed(folder, rope_theta=None, rope_parameters={"rope_theta": 999.0})
    assert transformers_model.read_hf_config(folder).rope_theta == 999.0
    assert transformers_model.load_reference(folder)[0].config.rope_theta == 999.0


def test_settings_of_generation_are_the_folders_or_the_models(folder):
    model, _ = transformers_model.load_reference(folder)
    (folder / "generation_config.json").write_text('{"top_k": 7}')
    assert transformers_model.read_generation_config(folder, model).top_k == 7
    (folder / "generation_config.json").write_text("[")
    assert transformers_model.read_generation_config(folder, model).eos_token_id == 0
    (folder / "generation_config.json").unlink()
    assert transformers_model.read_generation_config(folder, model).eos_token_id == 0


def test_a_model_is_filled_and_saved_as_it_was(whole, tmp_path):
    from safetensors.torch import load_file

    from superpod.weights.transfer import convert_tensors

    model, _ = transformers_model.load_reference(whole)
    tensors = {name: tensor.float() for name, tensor in convert_tensors.get_tensors(model).items()}
    filled = transformers_model.build_with_tensors(
        transformers_model.read_hf_config(whole), dict(tensors), is_tied=False
    )
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(filled(tokens).logits, model.float()(tokens).logits)
    transformers_model.save_model(filled, tmp_path, torch.bfloat16)
    before, after = load_file(whole / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert (written.get("eos_token_id"), written.get("bos_token_id")) == (0, None)  # -1 means none
    del tensors[UP]
    with pytest.raises(UserError, match=f"NeMo's model has no counterpart for {UP}"):
        transformers_model.build_with_tensors(transformers_model.read_hf_config(whole), tensors, is_tied=False)


def test_a_tied_model_is_filled_without_its_output_matrix(folder):
    from superpod.weights.transfer import convert_tensors

    changed(folder, tie_word_embeddings=True)
    rewritten(folder, lambda t: {name: tensor for name, tensor in t.items() if name != "lm_head.weight"})
    model, _ = transformers_model.load_reference(folder)
    tensors = {name: tensor for name, tensor in convert_tensors.get_tensors(model).items() if name != "lm_head.weight"}
    filled = transformers_model.build_with_tensors(transformers_model.read_hf_config(folder), tensors, is_tied=True)
    assert filled.lm_head.weight is filled.model.embed_tokens.weight


def test_numbers_beyond_float16_are_refused(whole, tmp_path):
    model, _ = transformers_model.load_reference(whole)
    with torch.no_grad():
        model.float().model.norm.weight[0] = 70_000.0
    with pytest.raises(UserError, match=r"model\.norm\.weight contains values that exceed the range of float16"):
        transformers_model.save_model(model, tmp_path, torch.float16)
    transformers_model.save_model(model, tmp_path, torch.bfloat16)


def test_what_the_router_keeps_in_fp32_stays_so(tmp_path):
    class Router(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))
            self.register_buffer("e_score_correction_bias", torch.full((2,), 1.001))
            self.config = SimpleNamespace()

        def save_pretrained(self, out):
            raise ValueError("top_p without do_sample")

    router = Router()
    with pytest.raises(UserError, match="transformers cannot write the model: ValueError: top_p without do_sample"):
        transformers_model.save_model(router, tmp_path, torch.bfloat16)
    assert (router.weight.dtype, router.e_score_correction_bias.dtype) == (torch.bfloat16, torch.float32)
    assert router.e_score_correction_bias[0].item() == pytest.approx(1.001)
