"""What an import and an export decide before and after NeMo does its part."""

import contextlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from superpod.errors import UserError
from superpod.weights.families import nemo_class, nemo_config
from superpod.weights.transfer import conversion, load, transformers_model
from tests.weights import tiny
from tests.weights.matrix_cases import V3
from tests.weights.tiny import changed


@pytest.fixture
def folder(tmp_path):
    return tiny.hollow(tmp_path / "folder")


def test_fp8_weights_of_deepseek_are_refused_with_the_way_round(folder):
    changed(folder, model_type="deepseek_v3", **V3)
    assert conversion.check_folder(folder).model == "DeepSeekModel"
    changed(folder, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UserError, match=r"NeMo 2\.7\.3 cannot import"):
        conversion.check_folder(folder)
    changed(folder, model_type="llama")
    with pytest.raises(UserError, match="the weights are in fp8"):
        conversion.check_folder(folder)


def test_unknown_keys_need_the_forward_check(folder):
    changed(folder, clip_qkv=8.0)
    assert conversion.check_importable(folder, True).unknown == ("clip_qkv",)
    with pytest.raises(UserError, match=r"config\.json has unknown keys: clip_qkv"):
        conversion.check_importable(folder, False)


def test_a_doubt_is_refused_where_the_forward_check_would_fail(folder, monkeypatch):
    doubtful = nemo_class.NemoClass("M", "C", {}, doubts=("transformers leaves it out",))
    monkeypatch.setattr(conversion, "check_folder", lambda folder: doubtful)
    assert conversion.check_importable(folder, False) is doubtful
    with pytest.raises(UserError, match="transformers leaves it out"):
        conversion.check_importable(folder, True)


@pytest.mark.parametrize(
    ("unknown", "checked", "notes"),
    [
        ((), True, []),
        ((), False, ["no forward check: the NeMo model was not compared with transformers"]),
        (("a", "b"), True, ["config.json has unknown keys: a, b; the result equals transformers, which ignores them"]),
        (("a",), False, ["no forward check: the NeMo model was not compared with transformers",
                         "config.json has unknown keys: a"]),
    ],
)  # fmt: skip
def test_an_import_says_what_it_did_not_show(unknown, checked, notes):
    assert conversion._list_import_notes(nemo_class.NemoClass("M", "C", {}, unknown), checked) == notes


def test_an_import_keeps_configuration_tokenizer_and_record(folder, tmp_path):
    (folder / "generation_config.json").write_text("{}")
    checkpoint = tmp_path / "nemo"
    assert conversion.find_kept_files(checkpoint) is None
    assert conversion.read_import_notes(checkpoint) == []
    conversion._keep_hf_files(folder, checkpoint / conversion.KEPT, {"notes": ["x"], "dtype": "float16"})
    kept = conversion.find_kept_files(checkpoint)
    assert kept is not None
    assert kept == checkpoint / "context" / "huggingface"
    names = {"config.json", "generation_config.json", "import.json", "tokenizer.json"}
    assert {file.name for file in kept.iterdir()} == names
    assert conversion.read_import_notes(checkpoint) == ["x"]


@pytest.mark.parametrize(
    ("record", "config", "dtype"),
    [
        ({"dtype": "float16"}, {"dtype": "float32"}, "float16"),
        (None, {"torch_dtype": "float32"}, "float32"),
        (None, {}, "bfloat16"),
        ({"dtype": "int8"}, {}, "bfloat16"),
    ],
)
def test_an_export_has_the_number_format_of_the_import(folder, record, config, dtype):
    changed(folder, **config)
    if record:
        (folder / "import.json").write_text(json.dumps(record))
    assert conversion._choose_dtype(folder) == dtype
    assert conversion._choose_dtype(None) == "bfloat16"


def test_raw_errors_become_the_users(capsys):
    with pytest.raises(UserError, match=r"^X: KeyError: 'a b'; nothing was written$"), conversion._as_user_error("X"):
        raise KeyError("a b")
    assert "Traceback" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"^mine$"), conversion._as_user_error("X"):
        raise UserError("mine")


def test_the_tokenizer_goes_with_the_export_as_it_was(folder, tmp_path):
    (folder / "generation_config.json").write_text("{}")
    (folder / "import.json").write_text("{}")
    out = tmp_path / "out"
    out.mkdir()
    conversion._copy_tokenizer(None, folder, out)
    assert {file.name for file in out.iterdir()} == {"tokenizer.json", "generation_config.json"}
    saved = []
    inner = SimpleNamespace(save_pretrained=lambda out: saved.append(out))
    conversion._copy_tokenizer(SimpleNamespace(tokenizer=SimpleNamespace(tokenizer=inner)), None, out)
    conversion._copy_tokenizer(SimpleNamespace(tokenizer=inner), None, out)
    assert saved == [out, out]


@pytest.mark.parametrize(("own", "written"), [("", True), ("x", False)])
def test_a_tokenizer_without_a_template_gets_the_plain_one(tmp_path, monkeypatch, own, written):
    from superpod.data.samples import chat
    from superpod.data.tokens import tokenizer

    monkeypatch.setattr(tokenizer, "load_pretrained", lambda folder: SimpleNamespace(chat_template=own))
    conversion.save_plain_template(tmp_path)
    file = tmp_path / "chat_template.jinja"
    assert file.exists() is written
    assert not written or file.read_text() == chat.DEFAULT_TEMPLATE


@pytest.mark.parametrize(("rows", "ids", "refused"), [(300, 300, False), (299, 300, True)])
def test_every_id_must_have_a_row(monkeypatch, tmp_path, rows, ids, refused):
    name = "nemo.collections.common.tokenizers.huggingface.auto_tokenizer"
    module: Any = ModuleType(name)
    module.AutoTokenizer = lambda folder: SimpleNamespace(tokenizer=range(ids), folder=folder)
    monkeypatch.setitem(sys.modules, name, module)
    importer = SimpleNamespace(save_hf_tokenizer_assets=lambda folder: f"{folder}/copied")
    said = nemo_class.NemoClass("M", "C", {"vocab_size": rows})
    if refused:
        with pytest.raises(UserError, match="has 300 ids, but the model's vocab_size is only 299"):
            conversion._load_tokenizer(importer, tmp_path, said)
        return
    assert conversion._load_tokenizer(importer, tmp_path, said).folder == f"{tmp_path}/copied"
    module.AutoTokenizer = lambda folder: 1 / 0
    with pytest.raises(UserError, match="cannot be read: division by zero"):
        conversion._load_tokenizer(importer, tmp_path, said)
    tiny.hollow(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text("{}")
    tiny.customize(tmp_path, tmp_path / "executed")
    with pytest.raises(UserError, match="custom code") as refusal:
        conversion._load_tokenizer(importer, tmp_path, said)
    assert "needs no custom code" in refusal.value.hint


def test_importers_save_the_tokenizer_in_a_folder_of_the_process(monkeypatch):
    transformers = pytest.importorskip("transformers")

    class ModelConnector:
        def save_hf_tokenizer_assets(self, name, save_path=""):
            return "/tmp/nemo_tokenizer"

    module: Any = ModuleType("nemo.lightning.io.connector")
    module.ModelConnector = ModelConnector
    monkeypatch.setitem(sys.modules, module.__name__, module)
    asked = []

    def from_pretrained(name, **options):
        asked.append((name, options))
        return SimpleNamespace(save_pretrained=lambda folder: Path(folder).mkdir())

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    with conversion.use_private_tokenizer_folder():
        folder = Path(ModelConnector().save_hf_tokenizer_assets("X"))
        assert folder.name == "nemo_tokenizer"
        assert folder != Path("/tmp/nemo_tokenizer")
        assert folder.is_dir()
    assert not folder.parent.exists()
    assert ModelConnector().save_hf_tokenizer_assets("X") == "/tmp/nemo_tokenizer"
    assert asked == [("X", {"local_files_only": True, "trust_remote_code": False})]


@pytest.mark.parametrize(
    ("said", "head", "tied"),
    [
        (True, None, True),
        (True, "same", True),
        (True, "other", False),
        (False, None, False),
        (False, "same", False),
    ],
)
def test_an_export_is_tied_where_both_sides_are(monkeypatch, said, head, tied):
    torch = pytest.importorskip("torch")
    from superpod.weights.transfer import convert_tensors

    embedding = torch.arange(4.0)
    state = {"embedding.word_embeddings.weight": embedding}
    if head:
        state["output_layer.weight"] = embedding.clone() if head == "same" else embedding + 1
    monkeypatch.setattr(load, "get_base_state_dict", lambda model: state)
    monkeypatch.setattr(nemo_config, "require_match", lambda nearest, model: None)
    monkeypatch.setattr(transformers_model, "build_uninitialized", lambda config: None)
    monkeypatch.setattr(convert_tensors, "get_tensors", lambda model: {"lm_head.weight": 1, "x": 2})
    expected = []
    monkeypatch.setattr(
        convert_tensors, "from_megatron", lambda s, c, kind, names, tied: expected.append((set(names), tied))
    )
    monkeypatch.setattr(transformers_model, "build_with_tensors", lambda config, tensors, tied: (config, tied))
    config = SimpleNamespace(**tiny.SIZES, model_type="llama", tie_word_embeddings=said, quantization_config={"x": 1})
    config.to_dict = lambda: {key: value for key, value in vars(config).items() if key != "to_dict"}
    model: Any = SimpleNamespace(config=None)
    made = conversion.fill_model(config, model)
    assert made == (config, tied)
    assert config.tie_word_embeddings is tied
    assert not hasattr(config, "quantization_config")
    assert expected == [({"x"} if tied else {"lm_head.weight", "x"}, tied)]


@pytest.fixture
def importing(monkeypatch, folder):
    """An import with NeMo's part played: what it was asked is in `calls`."""
    torch = pytest.importorskip("torch")
    from superpod.weights.transfer import convert_tensors, forward_check

    calls: dict[str, Any] = {}
    config = SimpleNamespace(generation_config=None)
    core = object()

    class Model:
        def __init__(self, config, tokenizer):
            self.config, self.tokenizer = config, tokenizer

        @staticmethod
        def importer(source):
            calls["source"] = source
            return SimpleNamespace(
                nemo_setup=lambda model: "trainer",
                nemo_save=lambda out, trainer: (out.mkdir(), calls.update(saved=trainer)),
            )

    weight = torch.nn.Linear(1, 1, dtype=torch.float16)
    weight.config = SimpleNamespace(model_type="llama")
    monkeypatch.setattr(transformers_model, "load_reference", lambda folder: (weight, ["of the load"]))
    monkeypatch.setattr(transformers_model, "read_generation_config", lambda folder, model: "settings")
    monkeypatch.setattr(nemo_config, "get_model_class", lambda nearest: Model)
    monkeypatch.setattr(nemo_config, "build_config", lambda nearest, dtype: calls.update(dtype=dtype) or config)
    monkeypatch.setattr(conversion, "_load_tokenizer", lambda importer, folder, nearest: "tokenizer")
    monkeypatch.setattr(conversion, "use_private_tokenizer_folder", contextlib.nullcontext)
    monkeypatch.setattr(load, "unwrap_model", lambda model: core)
    monkeypatch.setattr(convert_tensors, "get_tensors", lambda model: "tensors")
    monkeypatch.setattr(convert_tensors, "load_into_megatron", lambda *given: calls.update(given=given))
    monkeypatch.setattr(forward_check, "run_megatron", lambda core, config: "pass")
    outcome = forward_check.Comparison(48, 1e-6, 1e-4)
    monkeypatch.setattr(forward_check, "require_equal_logits", lambda *given: calls.update(agreed=given) or outcome)
    return SimpleNamespace(calls=calls, folder=folder, theirs=weight, core=core, config=config)


@pytest.mark.parametrize("checked", [True, False])
def test_an_import_moves_the_weights_compares_and_keeps_a_record(importing, tmp_path, checked):
    import torch

    out = tmp_path / "nemo"
    record = conversion.import_hf(importing.folder, out, forward_check=checked)
    calls = importing.calls
    assert calls["given"] == ("tensors", importing.core, importing.config, "llama")
    assert calls["source"] == f"hf://{importing.folder.absolute()}"
    assert (calls["dtype"], calls["saved"], importing.config.generation_config) == (
        torch.float16,
        "trainer",
        "settings",
    )
    assert record["dtype"] == "float16"
    assert json.loads((out / conversion.KEPT / "import.json").read_text()) == record
    if checked:
        assert calls["agreed"] == (importing.theirs, importing.core, "pass", str(importing.folder))
        assert record["forward_check"] == {"tokens": 48, "difference": 1e-6, "tolerance": 1e-4}
        assert record["notes"] == ["of the load"]
    else:
        assert "agreed" not in calls
        assert record["forward_check"] is None
        assert record["notes"] == ["of the load", conversion.UNCHECKED_NOTE]
    with pytest.raises(UserError, match="already exists"):
        conversion.import_hf(importing.folder, out)


def test_a_failed_import_leaves_nothing(importing, tmp_path, monkeypatch):
    monkeypatch.setattr(nemo_config, "build_config", lambda nearest, dtype: 1 / 0)
    with pytest.raises(UserError, match=r"NeMo cannot import .*: ZeroDivisionError"):
        conversion.import_hf(importing.folder, tmp_path / "nemo")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.fixture
def exporting(monkeypatch, tmp_path):
    """An export with NeMo's part played; the checkpoint is an import's."""
    torch = pytest.importorskip("torch")
    from superpod.data.tokens import tokenizer
    from superpod.weights.transfer import forward_check

    calls: dict[str, Any] = {"order": []}
    exporter = SimpleNamespace(trust_remote_code=True, tokenizer=None)
    api: Any = ModuleType("nemo.lightning.io.api")
    api.load_connector_from_trainer_ckpt = lambda checkpoint, kind: (
        calls.update(connector=(checkpoint, kind)) or exporter
    )
    package: Any = ModuleType("nemo.lightning.io")
    package.api = api
    monkeypatch.setitem(sys.modules, "nemo.lightning.io", package)
    model = SimpleNamespace(config="config")
    monkeypatch.setattr(load, "load_model", lambda checkpoint, dtype: calls.update(loaded=(checkpoint, dtype)) or model)
    monkeypatch.setattr(load, "unwrap_model", lambda model: "core")
    monkeypatch.setattr(load, "merge_adapters", lambda model: calls["order"].append("merged") or 3)
    monkeypatch.setattr(forward_check, "run_megatron", lambda core, config: calls["order"].append("pass") or "pass")
    outcome = forward_check.Comparison(48, 1e-6, 1e-4)
    monkeypatch.setattr(forward_check, "require_equal_logits", lambda *given: calls.update(agreed=given) or outcome)
    monkeypatch.setattr(transformers_model, "read_hf_config", lambda like: calls.update(like=like) or "theirs")
    monkeypatch.setattr(conversion, "fill_model", lambda config, model: ("filled", config))
    monkeypatch.setattr(
        transformers_model, "save_model", lambda target, out, dtype: (out.mkdir(), calls.update(saved=(target, dtype)))
    )
    monkeypatch.setattr(tokenizer, "load_pretrained", lambda folder: SimpleNamespace(chat_template=""))
    checkpoint = tmp_path / "nemo"
    conversion._keep_hf_files(tiny.hollow(tmp_path / "folder"), checkpoint / conversion.KEPT, {"dtype": "float16"})
    return SimpleNamespace(calls=calls, checkpoint=checkpoint, torch=torch, exporter=exporter)


@pytest.mark.parametrize("checked", [True, False])
def test_an_export_compares_what_was_trained_before_it_is_merged(exporting, tmp_path, checked):
    calls, torch = exporting.calls, exporting.torch
    done = conversion.export_hf(exporting.checkpoint, tmp_path / "out", forward_check=checked)
    assert calls["like"] == exporting.checkpoint / conversion.KEPT
    assert calls["loaded"] == (exporting.checkpoint, torch.float32)
    assert calls["connector"] == (exporting.checkpoint, "hf")
    assert exporting.exporter.trust_remote_code is False
    assert calls["saved"] == (("filled", "theirs"), torch.float16)
    assert done["merged"] == 3
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert not (tmp_path / "out" / "chat_template.jinja").exists()
    if checked:
        assert calls["order"] == ["pass", "merged"]
        assert calls["agreed"] == (("filled", "theirs"), "core", "pass", str(exporting.checkpoint))
        assert (done["forward_check"]["tokens"], done["notes"]) == (48, [])
    else:
        assert (calls["order"], done["forward_check"]) == (["merged"], None)
        assert done["notes"] == ["no forward check: the exported model was not compared with NeMo"]
    with pytest.raises(UserError, match="already exists"):
        conversion.export_hf(exporting.checkpoint, tmp_path / "out")


def test_an_export_takes_the_folder_format_and_template_that_are_named(exporting, tmp_path):
    like = tiny.hollow(tmp_path / "like")
    conversion.export_hf(exporting.checkpoint, tmp_path / "out", like, "float32", chat=True)
    assert exporting.calls["like"] == like
    assert exporting.calls["saved"][1] is exporting.torch.float32
    assert (tmp_path / "out" / "chat_template.jinja").is_file()
