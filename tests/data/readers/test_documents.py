import json
import os
import re
from pathlib import Path

import pytest

from superpod.data.readers import documents
from superpod.errors import UserError

ODD = 'it\'s "odd"\n[red] ☃.txt'


def _all(path: Path, shard_bytes: int, key: str = "text") -> list[str]:
    shards = documents.plan_shards(documents.scan_files([str(path)]), shard_bytes)
    return [text for shard in shards for piece in shard for text in documents.read_documents(piece, key)]


def test_find(tmp_path: Path):
    for name in ("b.txt", "a/x.txt", "a/b/y.txt", ODD, "c[1].txt", "out/z.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    files = documents.find_files(
        [f"{tmp_path}/**/*.txt", f"{tmp_path}/b.txt", f"{tmp_path}/c[1].txt"], tmp_path / "out"
    )
    assert files == sorted(str(tmp_path / name) for name in ("b.txt", "a/x.txt", "a/b/y.txt", ODD, "c[1].txt"))


def test_stdlib():
    files = documents.find_files(["stdlib"], Path("/nowhere"))
    assert any(path.endswith("/argparse.py") for path in files)
    assert not [path for path in files if "/site-packages/" in path or "/test/" in path or not path.endswith(".py")]
    assert 5e6 < sum(os.path.getsize(path) for path in files) < 3e7


@pytest.mark.parametrize(("name", "hint"), [("none/**/*.txt", "quote the glob"), ("", r"/\*\*/\*\.txt")])
def test_refuses_glob_without_match(tmp_path: Path, name: str, hint: str):
    with pytest.raises(UserError, match="matches no file") as caught:
        documents.find_files([f"{tmp_path}/{name}"], tmp_path / "out")
    assert str(tmp_path) in str(caught.value)
    assert re.search(hint, caught.value.hint)


@pytest.mark.parametrize("shard_bytes", [1, 2, 7, 30, 10**6])
def test_pieces_contain_all_lines(tmp_path: Path, shard_bytes: int):
    texts = ["one", "", "zwei ☃", "three\nlines\u2028", "four" * 9]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "x.jsonl").write_text(
        "\ufeff" + lines[0] + "\r\n\n" + "\n".join(lines[1:]), encoding="utf-8", newline=""
    )
    assert _all(tmp_path / "x.jsonl", shard_bytes) == texts


def test_a_text_file_is_one_document(tmp_path: Path):
    (tmp_path / "x.txt").write_bytes("\ufeffa\r\nb\n".encode())
    assert _all(tmp_path / "x.txt", 2) == ["a\r\nb\n"]
    (tmp_path / "x.txt").write_text(" \n\t\n")
    assert _all(tmp_path / "x.txt", 2) == [""]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", r"x\.jsonl:3: not JSON: Expecting property name .* at column 2"),
        (b'{"txet": "a"}', r"x\.jsonl:3: no key 'text', only 'txet'"),
        (b'["text"]', r"x\.jsonl:3: not a JSON object with the key 'text'"),
        (b'{"text": 5}', r"x\.jsonl:3: key 'text' is of type int, not a string"),
        (b'{"text": "\\ud800"}', r"x\.jsonl:3: key 'text' contains an unpaired surrogate"),
        (b"[" * 100_000, r"x\.jsonl:3: brackets or braces are nested too deeply"),
    ],
)
@pytest.mark.parametrize("shard_bytes", [5, 10**6])
def test_reports_bad_line(tmp_path: Path, line: bytes, message: str, shard_bytes: int):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n')
    with pytest.raises(UserError, match=message) as caught:
        _all(tmp_path / "x.jsonl", shard_bytes)
    assert "--json-key" in caught.value.hint


@pytest.mark.parametrize(
    ("raw", "utf8"),
    [(b"", True), ("☃".encode(), True), (b"caf\xe9", False), ("☃".encode()[:2], False), (b"\xff\xfea\0", False)],
)
def test_scan_detects_utf8(tmp_path: Path, raw: bytes, utf8: bool):
    (tmp_path / "x").write_bytes(raw)
    assert [source.utf8 for source in documents.scan_files([str(tmp_path / "x")])] == [utf8]


def test_utf8_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(documents, "_BLOCK", 2)
    (tmp_path / "x").write_text("☃☃ä", encoding="utf-8")
    assert documents.scan_files([str(tmp_path / "x")])[0].utf8


def test_refuses_changed_file(tmp_path: Path):
    (tmp_path / "x.txt").write_text("abc")
    (piece,), *_ = documents.plan_shards(documents.scan_files([str(tmp_path / "x.txt")]), 10)
    for change in (b"abcd", b"ab\xff"):
        (tmp_path / "x.txt").write_bytes(change)
        with pytest.raises(UserError, match=r"x\.txt changed during the build"):
            list(documents.read_documents(piece, "text"))
    (tmp_path / "x.txt").unlink()
    with pytest.raises(UserError, match=r"x\.txt changed during the build"):
        list(documents.read_documents(piece, "text"))


def test_escape_path():
    assert documents.escape_path("/a b/c.txt") == "/a b/c.txt"
    assert "\n" not in documents.escape_path(ODD)
    assert documents.escape_path("bad\udcff").encode()


def test_refuses_pipe(tmp_path):
    os.mkfifo(tmp_path / "text")
    with pytest.raises(UserError, match="is not a regular file"):
        documents.find_files([str(tmp_path / "text")], tmp_path / "out")
