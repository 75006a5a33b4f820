"""What is read from the headers of a Hugging Face folder: which files, whole or cut, in which number formats."""

import json

import pytest

from superpod.errors import UserError
from superpod.weights.families import nemo_class
from superpod.weights.transfer import hf_folder
from tests.weights import tiny
from tests.weights.tiny import changed


def safetensors(tensors, data=None):
    """A file of (name: (format, shape, bytes)); `data` bytes follow in place of all."""
    header, at = {}, 0
    for name, (kind, shape, size) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    header["__metadata__"] = {"format": "pt"}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(at if data is None else data)


A, B = {"a.weight": ("BF16", [2, 3], 12)}, {"b.weight": ("F32", [1], 4)}


@pytest.fixture
def whole(tmp_path):
    tiny.hollow(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(safetensors(A))
    return tmp_path


def shard(path, tensors, index=None):
    """Two shards in place of the one file."""
    (path / "model.safetensors").unlink()
    names = {}
    for number, part in enumerate(tensors, 1):
        (path / f"model-{number}.safetensors").write_bytes(safetensors(part))
        names |= dict.fromkeys(part, f"model-{number}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names if index is None else index}))


def test_a_whole_folder(whole):
    assert hf_folder.check_complete(whole).model == "LlamaModel"
    assert hf_folder.read_tensors(whole) == {"a.weight": hf_folder.Tensor("BF16", (2, 3))}
    assert hf_folder.count_weight_bytes(whole) == (whole / "model.safetensors").stat().st_size


def test_shards_are_read_in_order_and_sized_together(whole):
    shard(whole, [A, B])
    assert [file.name for file in hf_folder.find_weights(whole)] == ["model-1.safetensors", "model-2.safetensors"]
    assert hf_folder.read_tensors(whole).keys() == {"a.weight", "b.weight"}
    assert hf_folder.count_weight_bytes(whole) == sum(file.stat().st_size for file in whole.glob("model-?.safetensors"))
    assert hf_folder.check_complete(whole).model == "LlamaModel"


def test_one_file_counts_before_an_index_and_safetensors_before_pytorchs(whole):
    (whole / "model.safetensors.index.json").write_text("{}")
    (whole / "pytorch_model.bin").write_bytes(b"x")
    assert [file.name for file in hf_folder.find_weights(whole)] == ["model.safetensors"]
    (whole / "model.safetensors").unlink()
    (whole / "model.safetensors.index.json").unlink()
    assert [file.name for file in hf_folder.find_weights(whole)] == ["pytorch_model.bin"]
    assert hf_folder.read_tensors(whole) == {}


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (
            {"a.weight": "model-1.safetensors", "b.weight": "model-3.safetensors"},
            r"contains model-3.safetensors, which does",
        ),
        ({"a.weight": "../model-1.safetensors"}, "is not an index of shards"),
        ({"a.weight": 1}, "is not an index of shards"),
        (["a.weight"], "is not an index of shards"),
        ({"a.weight": "model-1.safetensors", "c.weight": "model-1.safetensors"}, "contains the tensor c.weight"),
    ],
)
def test_an_index_is_held_against_its_shards(whole, index, says):
    shard(whole, [A, B], index)
    with pytest.raises(UserError, match=says):
        hf_folder.read_tensors(whole)


def test_a_tensor_in_two_shards_is_refused(whole):
    shard(whole, [A, A | B], {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"})
    with pytest.raises(UserError, match=r"contains a.weight twice, the second time in model-2.safetensors"):
        hf_folder.read_tensors(whole)


@pytest.mark.parametrize(("data", "cut"), [(12, False), (13, False), (11, True)])
def test_a_file_must_hold_all_that_its_header_says(whole, data, cut):
    (whole / "model.safetensors").write_bytes(safetensors(A, data))
    if cut:
        with pytest.raises(UserError, match="is truncated"):
            hf_folder.find_weights(whole)
    else:
        assert hf_folder.find_weights(whole)


@pytest.mark.parametrize(
    "data",
    [b"", b"\x02\0\0\0", (2).to_bytes(8, "little") + b"{", (2).to_bytes(8, "little") + b"[]",
     (9).to_bytes(8, "little") + b'{"a": {}}', (1 << 40).to_bytes(8, "little") + b"{}"],
)  # fmt: skip
def test_what_is_no_header_is_cut_off(whole, data):
    (whole / "model.safetensors").write_bytes(data)
    with pytest.raises(UserError, match="is truncated, or not a safetensors file"):
        hf_folder.find_weights(whole)


@pytest.mark.parametrize(
    ("tensors", "stated", "kind"),
    [
        (A, "float32", "bfloat16"),
        (A | B, "bfloat16", "float32"),
        ({"a": ("F16", [1], 2)}, "", "float16"),
        (A | {"mlp.gate.e_score_correction_bias": ("F32", [1], 4)}, "", "bfloat16"),
        (A | {"a_blocks": ("U8", [1], 1)}, "", "bfloat16"),
        ({"a_blocks": ("U8", [1], 1)}, "bfloat16", "bfloat16"),
        ({"a_blocks": ("U8", [1], 1)}, "int8", "float32"),
    ],
)
def test_the_number_format_is_that_of_the_stored_tensors(whole, tensors, stated, kind):
    (whole / "model.safetensors").write_bytes(safetensors(tensors))
    assert hf_folder.find_dtype(whole, stated) == kind


@pytest.mark.parametrize(
    ("config", "kind"),
    [({}, ""), ({"torch_dtype": "torch.float16"}, "float16"), ({"dtype": "bfloat16", "torch_dtype": "x"}, "bfloat16")],
)
def test_a_configuration_states_its_format(config, kind):
    assert hf_folder.read_dtype(config) == kind


def test_quantized_weights_are_refused_unless_the_family_unpacks_them(whole):
    (whole / "model.safetensors").write_bytes(safetensors(A | {"b": ("F8_E4M3", [1], 1)}))
    with pytest.raises(UserError, match="b is stored as F8_E4M3, but NeMo imports only F32, BF16, F16"):
        hf_folder.check_complete(whole)
    changed(whole, model_type="gpt_oss", quantization_config={"quant_method": "mxfp4"}, num_local_experts=4,
            num_attention_heads=2)  # fmt: skip
    assert hf_folder.check_complete(whole).model == "GPTOSSModel"


def test_missing_weights_are_said_before_keys_that_nemo_does_not_compute(whole):
    changed(whole, hidden_act="quick_gelu")
    with pytest.raises(UserError, match="quick_gelu"):
        hf_folder.check_complete(whole)
    (whole / "model.safetensors").unlink()
    with pytest.raises(UserError, match="contains no weights"):
        hf_folder.check_complete(whole)
    changed(whole, model_type="bert")
    with pytest.raises(UserError, match="cannot import model_type 'bert'"):
        hf_folder.check_complete(whole)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_alone_is_refused_with_the_way_to_merge_it(whole, name):
    (whole / "model.safetensors").unlink()
    (whole / name).write_text("{}")
    with pytest.raises(UserError, match="contains only a PEFT adapter") as refused:
        hf_folder.find_weights(whole)
    assert "merge_and_unload" in refused.value.hint
    (whole / "config.json").unlink()
    if name == "adapter_config.json":
        with pytest.raises(UserError, match="a PEFT adapter without its base model") as refused:
            nemo_class.read_config(whole)
        assert "merge_and_unload" in refused.value.hint


@pytest.mark.parametrize("name", hf_folder.TOKENIZER_FILES)
def test_one_tokenizer_file_is_enough(whole, name):
    (whole / "tokenizer.json").rename(whole / name)
    assert hf_folder.check_complete(whole)


@pytest.mark.parametrize(
    ("name", "derived"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", True),
        ("rotary_emb.cos_cached", True),
        ("h.0.attn.masked_bias", True),
        ("h.0.attn.bias", True),
        ("model.layers.0.self_attn.q_proj.bias", False),
        ("rotary_emb.inv_freq.weight", False),
    ],
)
def test_tensors_that_the_configuration_gives(name, derived):
    assert bool(hf_folder.DERIVED.fullmatch(name)) is derived
