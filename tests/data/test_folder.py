import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superpod.data.folder import DataFolder, default_split, parse_split, relative_if_inside, split_ranges
from superpod.errors import UserError


def test_load_returns_what_was_written(folder: Path):
    loaded = DataFolder.load(folder, verify_sha=True)
    assert (loaded.documents, loaded.tokens, loaded.vocab, loaded.prefixes) == (10, 40, 50, ("text",))
    assert loaded.prefix_paths == (folder / "text",)
    assert loaded.tokenizer_path == folder / "tokenizer"
    assert loaded.tokenizer_name == str(folder / "tokenizer")
    assert loaded.blend == [str(folder / "text")]
    assert loaded.split_documents() == {"train": 8, "validation": 1, "test": 1}
    assert set(json.loads((folder / "dataset.json").read_text())) >= {
        "prefixes", "weights", "split", "tokenizer", "vocab", "tokens", "sha256",
    }  # fmt: skip
    loaded.write()
    assert DataFolder.load(folder) == loaded
    assert sorted(p.name for p in folder.iterdir()) == ["dataset.json", "text.bin", "text.idx", "tokenizer"]


def test_a_moved_folder_still_loads(folder: Path, tmp_path: Path):
    moved = folder.rename(tmp_path / "moved")
    assert DataFolder.load(moved).prefix_paths == (moved / "text",)


def test_index_cache_follows_the_content(folder: Path):
    loaded = DataFolder.load(folder)
    other = replace(loaded, sha256={"text": "0" * 64})
    assert loaded.index_cache_path.parent == folder / "index_cache"
    assert loaded.index_cache_path != other.index_cache_path
    assert not loaded.index_cache_path.parent.exists()


def _set(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "dataset.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return apply


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: (folder / "dataset.json").unlink(), r"is not a data folder: it has no dataset\.json"),
        (lambda folder: (folder / "dataset.json").write_text("{"), r"dataset\.json: file: Invalid JSON"),
        (_set(tokens="40"), r"dataset\.json: tokens: Input should be a valid integer"),
        (_set(schema=2), r"dataset\.json: schema: "),
        (_set(prefixes=[]), r"dataset\.json: prefixes: "),
        (_set(extra=1), r"dataset\.json: extra: "),
        (_set(weights=[1.0, 2.0]), r"dataset\.json: weights: 2 weights for 1 prefixes"),
        (_set(weights=[0]), r"dataset\.json: weights: \[0.0\] must be positive"),
        (_set(weights=[-1]), r"dataset\.json: weights: \[-1.0\] must be positive"),
        (_set(prefixes=["text", "text"]), r"dataset\.json: prefixes: a prefix is listed twice"),
        (_set(split="8,1"), r"dataset\.json: split '8,1' must be three numbers"),
        (_set(split="0,0,0"), r"dataset\.json: split '0,0,0' sums to 0"),
        (_set(split="98,1,1"), r"split: .*text: split 98,1,1 of 10 documents leaves none for validation and test"),
        (_set(tokens=41), r"dataset\.json: tokens: 41, but the files have 40"),
        (_set(documents=9), r"dataset\.json: documents: 9, but the files have 10"),
        (_set(prefixes=["gone"]), r"gone\.bin is missing"),
        (_set(tokenizer="gone"), r"dataset\.json: tokenizer: .*gone contains no tokenizer"),
        (_set(tokenizer="gone.model"), r"dataset\.json: tokenizer: .*gone\.model contains no tokenizer"),
        (lambda folder: (folder / "text.bin").write_bytes(bytes(79)), r"text\.idx points to byte 80 .*which has 79"),
    ],
)  # fmt: skip
def test_refuses_invalid_input(folder: Path, harm: Callable[[Path], None], message: str):
    harm(folder)
    with pytest.raises(UserError, match=message) as caught:
        DataFolder.load(folder)
    assert caught.value.hint


def test_only_verify_sha_notices_changed_tokens(folder: Path):
    raw = (folder / "text.bin").read_bytes()
    (folder / "text.bin").write_bytes(raw[::-1])
    DataFolder.load(folder)
    with pytest.raises(UserError, match=r"dataset\.json: sha256: text has"):
        DataFolder.load(folder, verify_sha=True)


def test_hub_tokenizer_is_not_checked(folder: Path):
    _set(tokenizer="hf:org/name")(folder)
    loaded = DataFolder.load(folder)
    assert (loaded.tokenizer_path, loaded.tokenizer_name) == (None, "org/name")


@pytest.mark.parametrize("split", ["", "1", "1,2", "1,2,3,4", "a,b,c", "1e3,1,1", "-1,1,1", "nan,1,1", "1,,1", "0,0,0"])
def test_refuses_invalid_splits(split: str):
    with pytest.raises(UserError, match="split"):
        parse_split(split)


@pytest.mark.parametrize(
    ("documents", "split"),
    [
        (1, "1,0,0"),
        (2, "1,1,0"),
        (3, "1,1,1"),
        (100, "96,3,1"),
        (499, "483,15,1"),
        (500, "484,15,1"),
        (501, "969,30,1"),
    ],
)
def test_default_split(documents: int, split: str):
    assert default_split(documents) == split
    parts = [end - begin for begin, end in split_ranges(split, documents)]
    assert sum(parts) == documents
    assert [bool(part) for part in parts] == [share > 0 for share in parse_split(split)]


def test_names_inside_the_folder_are_relative(tmp_path: Path):
    assert relative_if_inside(tmp_path / "a" / "b", tmp_path) == "a/b"
    assert relative_if_inside(tmp_path / "a" / ".." / ".." / "c", tmp_path) == str(tmp_path.parent / "c")


SHARES = st.integers(0, 999) | st.sampled_from([0.5, 33.3, 0.001])


@pytest.mark.nemo
@settings(max_examples=200, deadline=None)
@given(st.tuples(SHARES, SHARES, SHARES).filter(any), st.integers(0, 100_000))
def test_split_equals_megatrons(nemo: None, shares: tuple[float, ...], sequences: int):
    config = pytest.importorskip(
        "megatron.core.datasets.blended_megatron_dataset_config", reason="megatron-core is not installed"
    )
    split = ",".join(map(str, shares))
    matrix = config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(split))
    for ours, theirs in zip(split_ranges(split, sequences), matrix, strict=True):
        if theirs is None:
            assert ours[0] == ours[1]
        else:  # the rounding of BlendedMegatronDatasetBuilder._build_megatron_dataset_splits
            assert ours == tuple(round(edge * float(sequences)) for edge in theirs)


DIGITS = "9" * 5000
LONG = "a" * 5000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": f"{DIGITS},1,1"}, r"dataset\.json: split .* too large"),
        ({"split": "inf,1,1"}, r"dataset\.json: split 'inf,1,1' must be three numbers"),
        ({"split": "nan,1,1"}, r"dataset\.json: split 'nan,1,1' must be three numbers"),
        ({"split": LONG}, r"dataset\.json: split .* must be three numbers"),
        ({"vocab": 10**30}, r"dataset\.json: vocab: .*2147483647"),
        ({"prefixes": [LONG], "sha256": {}}, r"\(50\d\d characters\): File name too long"),
        ({"prefixes": ["a\0b"], "sha256": {}}, r"is not a path: .*null"),
        ({"tokenizer": LONG}, r"dataset\.json: tokenizer: .*File name too long"),
        ({"tokenizer": "a\0b"}, r"dataset\.json: tokenizer: .* is not a path"),
        ({"tokenizer": "hf:"}, r"dataset\.json: tokenizer: 'hf:' is not a valid name on the Hub"),
        ({"tokenizer": f"hf:{LONG}"}, r"dataset\.json: tokenizer: .* not a valid name on the Hub"),
        ({"sha256": {"a": "b"}}, r"dataset\.json: sha256: 'a': 'b' is not the digest of a prefix"),
        ({"sha256": {"text": "b"}}, r"dataset\.json: sha256: 'text': 'b' is not the digest"),
        ({"index_cache": "text.bin"}, r"dataset\.json: index_cache: .*text\.bin is a file, not a folder"),
        ({"index_cache": "text.bin/x"}, r"dataset\.json: index_cache: .*text\.bin is a file, not a folder"),
        ({"index_cache": "a\0b"}, r"dataset\.json: index_cache: .* is not a path"),
        ({"index_cache": LONG}, r"dataset\.json: index_cache: .*File name too long"),
    ],
    ids=range(17),
)
def test_refuses_extreme_values(folder: Path, changes: dict[str, Any], message: str):
    _set(**changes)(folder)
    with pytest.raises(UserError, match=message) as caught:
        DataFolder.load(folder)
    assert caught.value.hint
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(("path", "message"), [(LONG, "File name too long"), ("a\0b", "is not a path")], ids=range(2))
def test_refuses_empty_path(path: str, message: str):
    with pytest.raises(UserError, match=message):
        DataFolder.load(path)
