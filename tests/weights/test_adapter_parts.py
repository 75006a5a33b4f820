"""Which rows of Megatron's matrices an adapter of PEFT's takes, on a Llama of one layer without NeMo."""

from types import SimpleNamespace
from typing import Any

import pytest

from superpod.errors import UserError
from superpod.weights.transfer import adapter_export, load, transformers_model

torch = pytest.importorskip("torch", reason="torch: [nemo] extra")
from tests.weights import nemo_stubs  # noqa: E402

CONFIG = SimpleNamespace(num_attention_heads=4, num_query_groups=2, kv_channels=1, num_moe_experts=None, hidden_size=4)
QKV_ROWS = 8  # q0 q1 k0 v0 q2 q3 k1 v1
LAYER = "model.layers.0."


@pytest.fixture(autouse=True)
def stubs(monkeypatch):
    nemo_stubs.install(monkeypatch)


def module(**children):
    made = torch.nn.Module()
    for name, child in children.items():
        setattr(made, name, child)
    return made


def linear(rows, columns=4):
    return torch.nn.Linear(columns, rows, bias=False)


def adapted(rows, cls=nemo_stubs.LoRALinear, dim=2, alpha=8, magnitude=None, layer=None) -> Any:
    adapter: Any = nemo_stubs.Adapter(rows, 4, dim, alpha, magnitude)
    adapter.linear_in.weight.data = torch.arange(dim * 4.0).reshape(dim, 4)
    adapter.linear_out.weight.data = torch.arange(rows * 1.0).repeat(dim, 1).t().contiguous()  # row r holds r
    adapter.dropout = torch.nn.Dropout(0.25)
    return cls(layer or linear(rows), adapter)


def ours(qkv, fc1=None):
    layer = module(self_attention=module(linear_qkv=qkv), mlp=module(linear_fc1=fc1 or linear(12)))
    model = module(decoder=module(layers=torch.nn.ModuleList([layer])))
    model.config = CONFIG
    return model


def theirs(kind="llama", layers=1):
    def layer():
        attention = module(q_proj=linear(4), k_proj=linear(2), v_proj=linear(2), o_proj=linear(4))
        return module(self_attn=attention, mlp=module(gate_proj=linear(6), up_proj=linear(6)))

    model = module(model=module(layers=torch.nn.ModuleList([layer() for _ in range(layers)])))
    model.config = SimpleNamespace(model_type=kind)
    return model


@pytest.fixture
def written(monkeypatch, tmp_path):
    pytest.importorskip("safetensors")

    def write(model, **options):
        monkeypatch.setattr(transformers_model, "read_hf_config", lambda like: None)
        monkeypatch.setattr(transformers_model, "build_uninitialized", lambda config: theirs(**options))
        monkeypatch.setattr(
            adapter_export, "build_lora_config",
            lambda *given: SimpleNamespace(save_pretrained=lambda out: None),
        )  # fmt: skip
        count = adapter_export.write_adapter(model, tmp_path, "base", tmp_path / "out")
        from safetensors.torch import load_file

        return count, load_file(tmp_path / "out" / "adapter_model.safetensors")

    return write


def rows(tensor):
    return tensor[:, 0].int().tolist() if tensor.dim() == 2 else tensor.int().tolist()


def test_each_projection_gets_its_rows_of_the_product_and_all_of_its_input(written):
    count, tensors = written(ours(adapted(QKV_ROWS)))
    assert count == 3
    prefix = f"base_model.model.{LAYER}self_attn."
    assert tensors.keys() == {f"{prefix}{p}_proj.lora_{side}.weight" for p in "qkv" for side in "AB"}
    assert {p: rows(tensors[f"{prefix}{p}_proj.lora_B.weight"]) for p in "qkv"} == {
        "q": [0, 1, 4, 5], "k": [2, 6], "v": [3, 7],
    }  # fmt: skip
    for part in "qkv":
        assert tensors[f"{prefix}{part}_proj.lora_A.weight"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_dora_splits_its_magnitudes_alike(written):
    layer = adapted(QKV_ROWS, nemo_stubs.DoRALinear, magnitude=torch.arange(8.0))
    _, tensors = written(ours(layer))
    assert rows(tensors[f"base_model.model.{LAYER}self_attn.k_proj.lora_magnitude_vector"]) == [2, 6]


def test_gate_and_up_are_halves(written):
    count, tensors = written(ours(linear(QKV_ROWS), adapted(12)))
    assert count == 2
    assert rows(tensors[f"base_model.model.{LAYER}mlp.up_proj.lora_B.weight"]) == [6, 7, 8, 9, 10, 11]


def test_numbers_that_are_none_are_refused(written):
    layer = adapted(QKV_ROWS)
    layer.adapter.linear_out.weight.data[2, 0] = float("inf")
    with pytest.raises(UserError, match=r"first in .*k_proj.lora_B.weight"):
        written(ours(layer))


def test_a_model_without_an_adapter_is_refused(written):
    with pytest.raises(UserError, match="the checkpoint has no adapter"):
        written(ours(linear(QKV_ROWS)))


def test_a_matrix_that_is_no_linear_layer_in_transformers_is_refused(written):
    with pytest.raises(UserError, match=r"q_proj.weight in transformers' llama, which is not a separate") as refused:
        written(ours(adapted(QKV_ROWS)), layers=0)
    assert "export the merged model" in refused.value.hint
    model = ours(adapted(QKV_ROWS))
    model.own = linear(1)
    with pytest.raises(
        UserError, match=r"PEFT cannot represent this adapter: llama has no counterpart for own\.weight"
    ):
        written(model)


def test_experts_of_a_grouped_layer_share_its_adapter():
    grouped = torch.nn.Module()
    grouped.num_gemms = 2
    layer = adapted(QKV_ROWS, layer=grouped)
    names = [name for name, _ in adapter_export._list_adapted_matrices(ours(layer))]
    assert names == [f"decoder.layers.0.self_attention.linear_qkv.weight{expert}" for expert in range(2)]
    plain = [name for name, _ in adapter_export._list_adapted_matrices(ours(adapted(QKV_ROWS)))]
    assert plain == ["decoder.layers.0.self_attention.linear_qkv.weight"]


def test_rows_are_known_by_their_marks():
    marked = adapter_export._build_position_matrix(torch.empty(5, 3))
    assert marked.shape == (5, 3)
    kept = adapter_export._read_row_numbers(marked[[4, 1]])
    assert kept is not None
    assert kept.tolist() == [4, 1]
    assert adapter_export._read_row_numbers(marked.t()) is None
    assert adapter_export._read_row_numbers(marked[:, [0, 2, 1]]) is None
    assert adapter_export._read_row_numbers(marked[None]) is None


@pytest.mark.parametrize(
    ("names", "modules"),
    [
        (["a.0.q_proj", "a.1.q_proj"], ["q_proj"]),
        (["a.0.q_proj", "a.1.q_proj", "a.0.v_proj"], ["a.0.q_proj", "a.0.v_proj", "a.1.q_proj"]),
        (["a.1.v_proj", "a.0.v_proj", "a.0.q_proj", "a.1.q_proj"], ["q_proj", "v_proj"]),
    ],
)
def test_last_names_are_given_where_they_mean_the_same(names, modules):
    linears = [f"a.{layer}.{part}_proj" for layer in range(2) for part in "qvk"]
    assert adapter_export.choose_target_modules(names, linears) == modules


@pytest.mark.parametrize("dora", [False, True])
def test_pefts_description(dora):
    peft = pytest.importorskip("peft")
    cls = nemo_stubs.DoRALinear if dora else nemo_stubs.LoRALinear
    layer = adapted(4, cls, dim=4, alpha=8, magnitude=torch.ones(4) if dora else None)
    part = adapter_export.AdaptedMatrix(f"{LAYER}self_attn.q_proj", layer, torch.arange(4))
    said = adapter_export.build_lora_config([part], theirs(), "ORG/BASE")
    assert isinstance(said, peft.LoraConfig)
    assert (said.r, said.lora_alpha, said.lora_dropout, said.use_dora) == (4, 8, 0.25, dora)
    assert (said.base_model_name_or_path, said.task_type, said.inference_mode) == ("ORG/BASE", "CAUSAL_LM", True)
    assert said.target_modules == {"q_proj"}
    other = adapter_export.AdaptedMatrix(f"{LAYER}self_attn.k_proj", adapted(2, dim=2), torch.arange(2))
    with pytest.raises(UserError, match=r"have different \(rank, alpha\): \[\(2, 8\), \(4, 8\)\]"):
        adapter_export.build_lora_config([part, other], theirs(), "base")
    del layer.adapter.dropout
    assert adapter_export.build_lora_config([part], theirs(), "base").lora_dropout == 0.0


@pytest.fixture
def checkpoint(monkeypatch, tmp_path):
    """An adapter's checkpoint, its base imported from a folder that the import kept."""
    base = tmp_path / "base"
    kept = base / "context" / "huggingface"
    kept.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (kept / name).write_text("{}")
    monkeypatch.setattr(load, "find_base_checkpoint", lambda checkpoint: base)
    monkeypatch.setattr(load, "load_model", lambda checkpoint, dtype: (checkpoint, dtype))

    def write(model, like, name, out):
        assert (model, like, name) == ((tmp_path / "adapter", torch.float32), kept, "base")
        out.mkdir()
        return 7

    monkeypatch.setattr(adapter_export, "write_adapter", write)
    return tmp_path / "adapter"


def test_an_adapter_is_exported_with_the_tokenizer_and_without_the_bases_configuration(checkpoint, tmp_path):
    out = tmp_path / "new" / "out"
    assert adapter_export.export_adapter(checkpoint, out, None, "base") == 7
    assert sorted(file.name for file in out.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert [file.name for file in out.parent.iterdir()] == ["out"]


def test_what_an_export_cannot_do_without_is_named(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="already exists"):
        adapter_export.export_adapter(checkpoint, tmp_path / "there", None, "base")
    monkeypatch.setattr(load, "find_base_checkpoint", lambda checkpoint: tmp_path / "other")
    with pytest.raises(UserError, match=r"other has no copy of its Hugging Face config\.json"):
        adapter_export.export_adapter(checkpoint, tmp_path / "out", None, "base")
    monkeypatch.setattr(load, "find_base_checkpoint", lambda checkpoint: None)
    with pytest.raises(UserError, match="the checkpoint has no adapter"):
        adapter_export.export_adapter(checkpoint, tmp_path / "out", None, "base")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "there"]
