import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="the [nemo] extra is not installed")

from superpod.data.folder import DataFolder
from superpod.data.tokens import tokenizer
from superpod.errors import UserError


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tok") / "tokenizer"
    tokenizer.train(["the cat sat on the mat, the cat sat"] * 3, 270, out)
    return out


def test_round_trip_of_any_text(trained: Path):
    from tokenizers import Tokenizer

    loaded = tokenizer.load(trained)
    assert (loaded.engine, loaded.eod) == ("tokenizers", 0)
    text = "the cat\r\n\t ☃ \x00 <|endoftext|> <|pad|>"
    (ids,) = tokenizer.load_encoder(loaded)([text])
    assert Tokenizer.from_file(loaded.file).decode(ids, skip_special_tokens=True) == text
    assert not {0, 1}.intersection(ids), "text that spells a special token must not become one"


def test_train_returns_number_of_ids(tmp_path: Path):
    assert tokenizer.train(["ab" * 50], 5000, tmp_path / "t") < 300
    assert tokenizer.load(tmp_path / "t").vocab < 300


def test_refuses_small_vocabulary(tmp_path: Path):
    assert tokenizer.train(["abc abc"], 258, tmp_path / "t") == 258
    with pytest.raises(UserError, match=r"--vocab-size is 257; it must be between 258"):
        tokenizer.train(["abc"], 257, tmp_path / "u")


def test_refuses_tokenizer_without_end_of_sequence(trained: Path, tmp_path: Path):
    tokenizer.copy_files(trained, tmp_path / "t")
    (tmp_path / "t" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(UserError, match="has no end-of-sequence token"):
        tokenizer.load(tmp_path / "t")


def test_copy_leaves_weights_behind(trained: Path, tmp_path: Path):
    tokenizer.copy_files(trained, tmp_path / "model")
    before = tokenizer.digest(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(100))
    assert tokenizer.digest(tmp_path / "model") == before
    tokenizer.copy_files(tmp_path / "model", tmp_path / "copied")
    assert sorted(f.name for f in (tmp_path / "copied").iterdir()) == sorted(f.name for f in trained.iterdir())


def test_folder_without_a_tokenizer(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"contains no tokenizer") as caught:
        tokenizer.list_files(tmp_path)
    assert "hf download" in caught.value.hint


def test_sentencepiece_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "x.model").write_bytes(b"")
    with pytest.raises(UserError, match="the Python package sentencepiece is required") as caught:
        tokenizer.load(tmp_path / "x.model")
    assert caught.value.hint == "pip install sentencepiece"


def test_encodes_like_sentencepiece(tmp_path: Path):
    """Build with a real model that is trained on the text of this file."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="the [nemo] extra brings sentencepiece")
    source = tmp_path / "text.txt"
    source.write_text("\n".join(line for line in Path(__file__).read_text().splitlines() if line.strip()))
    sentencepiece.SentencePieceTrainer.train(
        input=str(source), model_prefix=str(tmp_path / "x"), vocab_size=300, hard_vocab_limit=False, minloglevel=2
    )
    loaded = tokenizer.load(tmp_path / "x.model", tmp_path / "backend")
    real = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "x.model"))
    assert (loaded.vocab, loaded.eod) == (real.get_piece_size(), real.eos_id())
    assert tokenizer.load_encoder(loaded)(["def test", ""]) == [real.encode("def test"), []]


@pytest.mark.nemo
def test_transformers_and_nemo_agree(built: Path, nemo: None):
    from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
    from transformers import AutoTokenizer as Transformers

    folder = DataFolder.load(built)
    theirs, hf = (
        AutoTokenizer(folder.tokenizer_name, use_fast=True),
        Transformers.from_pretrained(folder.tokenizer_name),
    )
    assert (theirs.vocab_size, theirs.eod, theirs.pad_id) == (folder.vocab, 0, 1)
    ids = tokenizer.load_encoder(tokenizer.load(built / "tokenizer"))(["abc  def\n☃"])[0]
    assert theirs.text_to_ids("abc  def\n☃") == ids == hf("abc  def\n☃")["input_ids"]


@pytest.mark.nemo
def test_converts_folder_that_needs_transformers(trained: Path, tmp_path: Path, nemo: None):
    """A GPT-2 folder needs transformers, and is converted to a plain tokenizer.json for the workers."""
    tokenizer.copy_files(trained, tmp_path / "t")
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": tokenizer.EOD, "unk_token": tokenizer.EOD}
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": tokenizer.EOD}))
    loaded = tokenizer.load(tmp_path / "t", tmp_path / "backend.json")
    plain = tokenizer.load(trained)
    assert (loaded.engine, loaded.file, loaded.vocab, loaded.eod) == (
        "tokenizers", str(tmp_path / "backend.json"), plain.vocab, 0,
    )  # fmt: skip
    slow = tokenizer.Tokenizer("transformers", str(tmp_path / "t"), plain.vocab, 0)
    texts = ["the cat sat <|endoftext|>", "", "\n ☃"]
    assert (
        tokenizer.load_encoder(loaded)(texts)
        == tokenizer.load_encoder(plain)(texts)
        == tokenizer.load_encoder(slow)(texts)
    )


@pytest.mark.nemo
def test_reports_folder_that_transformers_cannot_load(tmp_path: Path, nemo: None):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=f"cannot load a tokenizer from {tmp_path}"):
        tokenizer.load(tmp_path)
