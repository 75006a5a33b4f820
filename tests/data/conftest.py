import random
from collections.abc import Callable
from pathlib import Path

import pytest


def _write_corpus(folder: Path, files: int, words: int, seed: int = 0) -> Path:
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(500)]
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        (folder / f"{number:03d}.txt").write_text(" ".join(rng.choices(vocabulary, k=words)) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def write_corpus() -> Callable[..., Path]:
    """write_corpus(folder, files, words, seed=0): write text files of reproducible random words."""
    return _write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 text files of 300 words."""
    return _write_corpus(tmp_path_factory.mktemp("corpus"), files=40, words=300)


@pytest.fixture(scope="session")
def built(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished data folder of the corpus with vocabulary 300, which tests must not change."""
    pytest.importorskip("tokenizers", reason="the [nemo] extra is not installed")
    from superpod.data.tokens.build import build
    from superpod.data.tokens.build_options import BuildOptions

    out = tmp_path_factory.mktemp("built") / "data"
    build([f"{corpus}/*.txt"], out, BuildOptions(vocab_size=300, split="80,10,10"), workers=1)
    return out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder with 10 documents of 4 tokens below 50 and a dummy tokenizer."""
    from superpod.data.folder import DataFolder
    from superpod.data.tokens.indexed import Writer

    out = tmp_path / "made"
    (out / "tokenizer").mkdir(parents=True)
    (out / "tokenizer" / "tokenizer.json").write_text("{}")
    with Writer(out / "text", vocab=50) as writer:
        for number in range(10):
            writer.add([number, 1, 2, 3])
    DataFolder(
        path=out, prefixes=("text",), tokenizer="tokenizer", vocab=50, tokens=40, documents=10, split="8,1,1",
        sha256={"text": writer.sha256},
    ).write()  # fmt: skip
    return out
