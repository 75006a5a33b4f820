"""Test `data build` with tables, compressed lines, saved datasets and bad lines."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="the [nemo] extra is not installed")
pytest.importorskip("pyarrow", reason="the [nemo] extra is not installed")

from superpod.data.tokens.build import build
from superpod.data.tokens.build_options import BuildOptions
from superpod.errors import UserError


def as_rows(folder: Path) -> dict[str, Path]:
    """Write the same documents in every format with rows."""
    from tests.data.readers.test_dataset_folder import saved
    from tests.data.readers.test_rows import write_arrow, write_parquet

    rows = [{"text": f"document {at} of the corpus"} for at in range(40)]
    lines = "\n".join(map(json.dumps, rows)).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    write_parquet(folder / "c.parquet", rows)
    saved(folder / "saved", 1)
    write_arrow(folder / "saved" / "data-00000-of-00001.arrow", rows)
    return {path.name: path for path in sorted(folder.iterdir())}


def test_tables_and_compressed_lines_have_the_same_documents(tmp_path: Path):
    (tmp_path / "in").mkdir()
    digests = set()
    for name, path in as_rows(tmp_path / "in").items():
        made = build([str(path)], tmp_path / name, BuildOptions(vocab_size=300), workers=1).folder
        assert made.documents == 40
        digests.add(made.sha256["text"])
    assert len(digests) == 1


def test_skips_and_stores_bad_lines(tmp_path: Path):
    good = [json.dumps({"text": f"document {at}"}) for at in range(120)]
    (tmp_path / "a.jsonl").write_text("\n".join([*good[:60], "{}", *good[60:], '{"text": 3}', ""]))
    options = BuildOptions(vocab_size=300, skip=True)
    for shard_bytes in (None, 300):  # the lines of many shards have their numbers too
        out = tmp_path / f"out{shard_bytes}"
        report = build([f"{tmp_path}/a.jsonl"], out, options, workers=1, shard_bytes=shard_bytes)
        assert report.folder.documents == 120
        reasons = "1 x not a JSON object with the key ..., 1 x key ... is of type int, not a string"
        assert any(note.startswith(f"skipped 2 bad lines ({reasons}), copied to ") for note in report.notes)
        kept = [json.loads(line) for line in (out / "skipped.jsonl").read_text().splitlines()]
        assert [(row["line"], row["text"].strip()) for row in kept] == [(61, "{}"), (122, '{"text": 3}')]
    with pytest.raises(UserError, match=r"2 of 122 lines are bad \(1.6%\), but --max-bad-share is 0.01"):
        build([f"{tmp_path}/a.jsonl"], tmp_path / "few", replace(options, max_bad_share=0.01), workers=1)
    with pytest.raises(UserError, match=r"a.jsonl:61: not a JSON object with the key 'text'") as refused:
        build([f"{tmp_path}/a.jsonl"], tmp_path / "none", BuildOptions(vocab_size=300), workers=1)
    assert "--skip-bad-lines" in refused.value.hint


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("cut.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 999)[:-9], "is truncated"),
        ("a.parquet", b"PAR1 and nothing", "cannot be read as parquet"),
        ("plain.jsonl.gz", b'{"text": "a"}', "Not a gzipped file"),
    ],
    ids=["cut", "spoilt", "plain"],  # gzip's bytes hold the time, and the workers must collect the same names
)
def test_refuses_damaged_table(name: str, content: bytes, says: str, tmp_path: Path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=says):
        build([str(tmp_path / name)], tmp_path / "out", BuildOptions(vocab_size=300, skip=True), workers=1)
