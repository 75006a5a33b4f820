import math
from pathlib import Path

import pytest

pytest.importorskip("numpy", reason="the [nemo] extra is not installed")

from superpod.data import DataFolder, unigram_entropy
from superpod.data.tokens.indexed import Writer
from superpod.errors import UserError


def make(
    folder: Path, parts: list[list[list[int]]], split: str, weights: tuple[float, ...] | None = None
) -> DataFolder:
    for number, documents in enumerate(parts):
        with Writer(folder / f"{number}", vocab=100) as out:
            for tokens in documents:
                out.add(tokens)
    names = tuple(str(number) for number in range(len(parts)))
    return DataFolder(
        path=folder, prefixes=names, tokenizer="hf:none", vocab=100, split=split, weights=weights,
        tokens=sum(len(d) for p in parts for d in p), documents=sum(map(len, parts)),
    )  # fmt: skip


def test_entropy_computed_by_hand(tmp_path: Path):
    # train: 3 documents, validation: [1 1 2 3], test: [9]
    folder = make(tmp_path, [[[5, 5], [6], [7], [1, 1, 2, 3], [9]]], "3,1,1")
    assert unigram_entropy(folder) == pytest.approx(1.5 * math.log(2))
    assert unigram_entropy(folder, "train") == pytest.approx(1.5 * math.log(2))
    assert unigram_entropy(folder, "test") == 0.0


def test_a_blend_mixes_by_weight_or_by_tokens(tmp_path: Path):
    parts = [[[0], [1]], [[0], [2, 2, 2]]]
    even, sizes = make(tmp_path, parts, "1,1,0", (5.0, 5.0)), make(tmp_path, parts, "1,1,0")
    assert unigram_entropy(even) == pytest.approx(math.log(2))
    assert unigram_entropy(sizes) == pytest.approx(-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)))


@pytest.mark.parametrize(
    ("split", "message"), [("test", r"test has no tokens in .* with split 1,1,0"), ("valid", "unknown split")]
)
def test_refuses_empty_part(tmp_path: Path, split: str, message: str):
    with pytest.raises(UserError, match=message):
        unigram_entropy(make(tmp_path, [[[0], [1]]], "1,1,0"), split)
