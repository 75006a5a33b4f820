"""Test what `data build` refuses before it reads text."""

from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="the [nemo] extra is not installed")

from superpod.data.tokens import worker_pool
from superpod.data.tokens.build import build
from superpod.data.tokens.build_options import BuildOptions
from superpod.errors import UserError

OPTIONS = BuildOptions(vocab_size=300, split="80,10,10")


@pytest.mark.parametrize(
    ("out", "options", "more", "message"),
    [
        ("out", OPTIONS, {"workers": 100_000}, r"--workers is 100000; with"),
        ("out", OPTIONS, {"workers": 0}, r"--workers is 0; with"),
        ("file.txt/x", OPTIONS, {}, r"file\.txt is a file, not a folder"),
        ("file.txt/x/y", OPTIONS, {}, r"file\.txt is a file, not a folder"),
        ("gone", OPTIONS, {}, r"gone is a file, not a folder"),
        ("/proc/x/y", OPTIONS, {}, "/proc/x/y cannot be written: "),
        ("/dev/null/x", OPTIONS, {}, "/dev/null is a file, not a folder"),
        ("a" * 5000, OPTIONS, {}, "File name too long"),
        ("a\0b", OPTIONS, {}, "is not a path"),
        (
            "out",
            BuildOptions(vocab_size=999_999_999_999),
            {},
            "--vocab-size is 999999999999; it must be between 258 .* and 16777216",
        ),
        ("out", BuildOptions(tokenizer=Path("a" * 5000)), {}, "--tokenizer .*File name too long"),
        ("out", BuildOptions(tokenizer=Path("a\0b")), {}, "--tokenizer .* is not a path"),
        ("out", BuildOptions(300, split="9" * 5000 + ",1,1"), {}, "too large"),
    ],
    ids=range(13),
)
def test_refuses_before_reading(
    corpus: Path,
    tmp_path: Path,
    out: str,
    options: BuildOptions,
    more: dict,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
):
    (tmp_path / "file.txt").write_text("")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(worker_pool, "start_workers", lambda _: pytest.fail("work began"))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=message) as caught:
        build([f"{corpus}/*.txt"], tmp_path / out, options, workers=more.get("workers", 1))
    assert caught.value.hint
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("raw", [b"", b"garbage" * 9])
def test_refuses_invalid_sentencepiece_model(corpus: Path, tmp_path: Path, raw: bytes):
    pytest.importorskip("sentencepiece")
    (tmp_path / "bad.model").write_bytes(raw)
    with pytest.raises(UserError, match=r"bad\.model is not a SentencePiece model"):
        build([f"{corpus}/*.txt"], tmp_path / "out", BuildOptions(tokenizer=tmp_path / "bad.model"), workers=1)
    assert not (tmp_path / "out").exists()
