import shutil
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="the [nemo] extra is not installed")

from superpod.data.folder import DataFolder
from superpod.data.tokens import indexed, tokenizer
from superpod.data.tokens.add import add
from superpod.data.tokens.indexed import Writer
from superpod.errors import UserError


def test_a_blend(built: Path, folder: Path, tmp_path: Path):
    seen: list[tuple[int, int]] = []
    added = add(
        tmp_path / "out", [f"{built}/text", f"{folder}/text.bin"], f"{built}/tokenizer", weights=[0.3, 2],
        split="8,1,1", index_cache=tmp_path / "cache", progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert added.blend == ["0.3", f"{built}/text", "2.0", f"{folder}/text"]
    assert (added.documents, added.vocab) == (50, 300)
    assert added.index_cache_path.parent == tmp_path / "cache"
    assert (
        seen[-1][0]
        == seen[-1][1]
        == sum((p / f"text.{e}").stat().st_size for p in (built, folder) for e in ("bin", "idx"))
    )
    assert added == DataFolder.load(tmp_path / "out", verify_sha=True)
    assert added.sha256[f"{folder}/text"] == DataFolder.load(folder).sha256["text"]


def test_registering_again_changes_nothing(built: Path, tmp_path: Path):
    arguments = [f"{built}/text"], f"{built}/tokenizer"
    first = add(tmp_path / "out", *arguments, split="8,1,1", sha256=False)
    assert first.sha256 == {}
    assert add(tmp_path / "out", *arguments, split="8,1,1", sha256=False) == first
    with pytest.raises(UserError, match="is a data folder with different values of split"):
        add(tmp_path / "out", *arguments, split="9,1,1", sha256=False)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate an empty Hub cache, without importing transformers."""

    def absent(name: str) -> None:
        raise UserError(f"no tokenizer loads from {name}", "fetch it")

    monkeypatch.setattr(tokenizer, "load_pretrained", absent)


def test_names_inside_files_relatively(folder: Path, no_hub: None):
    (folder / "dataset.json").unlink()
    added = add(folder, [f"{folder}/text"], "hf:org/name", split="8,1,1", vocab_size=50)
    assert (added.prefixes, added.tokenizer, added.vocab) == (("text",), "hf:org/name", 50)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefixes": []}, "at least one --prefix"),
        ({"prefixes": ["{}/gone"]}, r"gone\.bin is missing"),
        ({"weights": [1, 2]}, "^--weight: 2 weights for 1 prefixes"),
        ({"weights": [-1]}, r"^--weight: \[-1\] must be positive"),
        ({"split": "969,30,1"}, "^--split: .*/text: split 969,30,1 of 10 documents leaves none"),
        ({"prefixes": [""]}, "^--prefix is empty"),
        ({"tokenizer_name": " "}, "^--tokenizer is empty"),
        ({"split": "1,2"}, "must be three numbers"),
        ({"prefixes": ["{}/text", "{}/text"]}, "^--prefix: a prefix is listed twice"),
        ({"tokenizer_name": "/no/such"}, "--tokenizer /no/such does not exist"),
        ({"vocab_size": 77}, "--vocab-size is 77, but the tokenizer .* has 300"),
        ({"prefixes": ["{}/high"]}, r"high\.bin contains token id 301, but the tokenizer has ids 0 to 299"),
    ],
)
def test_refuses_invalid_input(built: Path, folder: Path, tmp_path: Path, changes: dict, message: str):
    with Writer(folder / "high", vocab=1000) as out:
        for _ in range(10):
            out.add([301])
    arguments = {"prefixes": ["{}/text"], "tokenizer_name": f"{built}/tokenizer", "split": "8,1,1"} | changes
    arguments["prefixes"] = [prefix.format(folder) for prefix in arguments["prefixes"]]
    with pytest.raises(UserError, match=message) as caught:
        add(tmp_path / "out", **arguments)
    assert caught.value.hint
    assert not (tmp_path / "out").exists()


def test_refuses_folder_with_other_files(built: Path, tmp_path: Path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(UserError, match="contains other files"):
        add(tmp_path, [f"{built}/text"], f"{built}/tokenizer", split="8,1,1")
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_an_unknown_hub_tokenizer_needs_the_vocabulary(built: Path, tmp_path: Path, no_hub: None):
    with pytest.raises(UserError, match="no tokenizer loads from org/name") as caught:
        add(tmp_path / "out", [f"{built}/text"], "org/name", split="8,1,1")
    assert caught.value.hint == "fetch it; or pass --vocab-size"
    assert add(tmp_path / "out", [f"{built}/text"], "org/name", split="8,1,1", vocab_size=300).vocab == 300


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": "{0}/text.bin/x"}, r"text\.bin is a file, not a folder"),
        ({"out": "/proc/x"}, "/proc/x cannot be written: "),
        ({"out": "a" * 5000}, "File name too long"),
        ({"out": "/tmp" + "/a" * 2036}, "File name too long"),
        ({"out": "a\0b"}, "is not a path"),
        ({"prefixes": ["a" * 5000]}, "File name too long"),
        ({"prefixes": ["a\0b"]}, "is not a path"),
        ({"tokenizer_name": "{0}/bad.model"}, r"bad\.model is not a SentencePiece model"),
        ({"tokenizer_name": "{0}/bad.model", "vocab_size": 50}, r"bad\.model is not a SentencePiece model"),
        ({"tokenizer_name": "hf:"}, "'hf:' is not a valid name on the Hub"),
        ({"tokenizer_name": "a" * 5000}, "File name too long"),
        ({"index_cache": "/etc/passwd"}, "^--index-cache: /etc/passwd is a file"),
        ({"index_cache": "a\0b"}, "is not a path"),
        ({"vocab_size": 2**31}, r"--vocab-size is 2147483648; it must be between 1 and 2147483647"),
        ({"vocab_size": 0}, "--vocab-size is 0; it must be between"),
        ({"split": "9" * 400 + ",1,1"}, "too large"),
    ],
    ids=range(16),
)
def test_refused_before_hashing(
    built: Path, folder: Path, tmp_path: Path, changes: dict, message: str, monkeypatch: pytest.MonkeyPatch
):
    if "bad.model" in str(changes):
        pytest.importorskip("sentencepiece")
        (folder / "bad.model").write_bytes(b"garbage" * 9)
    monkeypatch.setattr(indexed, "digest", lambda *_: pytest.fail("hashed"))
    arguments = {"out": "{1}/out", "prefixes": ["{0}/text"], "tokenizer_name": f"{built}/tokenizer", "split": "8,1,1"}
    arguments |= changes
    for key in ("out", "tokenizer_name"):
        arguments[key] = arguments[key].format(folder, tmp_path)
    arguments["prefixes"] = [prefix.format(folder) for prefix in arguments["prefixes"]]
    with pytest.raises(UserError, match=message) as caught:
        add(**arguments)
    assert caught.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("again", ["link", "copy"])
def test_refuses_same_tokens_twice(again: str, folder: Path, no_hub: None, tmp_path: Path):
    for ending in ("bin", "idx"):
        second = tmp_path / f"second.{ending}"
        if again == "link":
            second.symlink_to(folder / f"text.{ending}")
        else:
            shutil.copyfile(folder / f"text.{ending}", second)
    with pytest.raises(UserError, match=r"--prefix: .*second has the same tokens as .*text$"):
        add(tmp_path / "out", [f"{folder}/text", f"{tmp_path}/second"], "hf:org/name", split="8,1,1", vocab_size=50)
    assert not (tmp_path / "out").exists()
