"""Test all formats of sample files, intact and damaged."""

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
import time

import pytest

from superpod.data.readers import rows
from superpod.data.samples import samples
from superpod.errors import UserError

PAIRS = [{"prompt": f"q{at} é", "completion": f"a{at}"} for at in range(700)]
LINES = "\n".join(json.dumps(pair, ensure_ascii=False) for pair in PAIRS).encode()
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"q{at}"},
            {"role": "assistant", "content": "a", "weight": at % 2 or None},
        ]
    }
    for at in range(1, 20)
]


def write_lines(path):
    path.write_bytes(LINES)


def write_zst(path):
    arrow = pytest.importorskip("pyarrow")
    with arrow.output_stream(str(path), compression="zstd") as out:
        out.write(LINES)


def write_parquet(path, pairs=PAIRS):
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(pairs), path, row_group_size=100)


def write_arrow(path, pairs=PAIRS):
    arrow = pytest.importorskip("pyarrow")
    table = arrow.Table.from_pylist(pairs)
    with arrow.OSFile(str(path), "wb") as out, arrow.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)


FORMS = {
    "a.jsonl": write_lines,
    "a.txt": write_lines,
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "a.ndjson.bz2": lambda path: path.write_bytes(bz2.compress(LINES)),
    "a.jsonl.xz": lambda path: path.write_bytes(lzma.compress(LINES)),
    "a.jsonl.zst": write_zst,
    "a.json": lambda path: path.write_text(json.dumps(PAIRS)),
    "indented.json": lambda path: path.write_text("\ufeff\n " + json.dumps(PAIRS, indent=2, ensure_ascii=False) + "\n"),
    "a.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(PAIRS).encode())),
    "a.parquet": write_parquet,
    "a.arrow": write_arrow,
    "a.csv": lambda path: path.write_text(
        "\ufeffcompletion,id,prompt\r\n" + "".join(f'{p["completion"]},,"{p["prompt"]}"\r\n' for p in PAIRS)
    ),
    "a.tsv": lambda path: path.write_text(
        "completion\tprompt\n" + "".join(f"{p['completion']}\t{p['prompt']}\n" for p in PAIRS)
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_all_formats_have_the_same_samples(name, tmp_path):
    FORMS[name](tmp_path / name)
    read = samples.read_samples(tmp_path / name)
    assert [(s.text[: s.prompt], s.text[s.prompt :]) for s in read] == [(p["prompt"], p["completion"]) for p in PAIRS]
    first = 2 if name[2:] in ("csv", "tsv") else 1  # the first line names the columns
    assert [s.line for s in read] == list(range(first, len(PAIRS) + first))


@pytest.mark.parametrize("write", [write_parquet, write_arrow])
def test_removes_nulls_of_nested_structs(write, tmp_path):
    path = tmp_path / f"chats.{write.__name__.removeprefix('write_')}"
    write(path, [{**chat, "id": number, "prompt": None} for number, chat in enumerate(CHATS)])
    bad = samples.BadLines(samples.ReadOptions(skip=True))
    read = list(samples.stream_samples([path], bad))
    assert bad.count == 0
    assert read[0].messages == ({"role": "user", "content": "q1"}, {"role": "assistant", "content": "a"})


def cut(write):
    def spoil(path):
        write(path)
        path.write_bytes(path.read_bytes()[:-200])

    return spoil


def growing(path):
    path.write_bytes(LINES)


HOSTILE = {
    "cut.jsonl.gz": (cut(FORMS["a.jsonl.gz"]), "truncated: its compressed data is incomplete"),
    "cut.jsonl.xz": (cut(FORMS["a.jsonl.xz"]), "truncated: its compressed data is incomplete"),
    "cut.jsonl.zst": (cut(write_zst), "cannot be read: "),
    "cut.parquet": (cut(write_parquet), "cannot be read as parquet: "),
    "cut.arrow": (cut(write_arrow), "cannot be read as arrow: "),
    "cut.json": (cut(FORMS["a.json"]), "element .* is not JSON"),
    "open.json": (lambda path: path.write_text('[{"text": "a"},'), "element 2 is not JSON"),
    "twice.json": (lambda path: path.write_text('[{"text": "a"}] [1]'), "after the array"),
    "comma.json": (lambda path: path.write_text('[{"text": "a"} {"text": "b"}]'), "',' expected"),
    "deep.json": (lambda path: path.write_text("[" * 200_000), "element 1 is not JSON"),
    "latin.json": (lambda path: path.write_bytes(b'[{"text": "\xe9"}]'), "it is not UTF-8"),
    "plain.jsonl.gz": (write_lines, "cannot be read: Not a gzipped file"),
    "plain.jsonl.zst": (write_lines, "cannot be read: "),
    "gzip.jsonl": (FORMS["a.jsonl.gz"], "is a gzip file"),
    "parquet.jsonl": (write_parquet, "is a Parquet file"),
    "book.jsonl": (lambda path: path.write_bytes(b"PK\x03\x04" + bytes(100)), "is a zip file"),
    "utf16.jsonl": (lambda path: path.write_text('{"text": "a"}', encoding="utf-16"), "is UTF-16, not UTF-8"),
    "pointer.parquet": (
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n"),
        "is a Git LFS pointer",
    ),
    "pointer.jsonl": (
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n"),
        "is a Git LFS pointer",
    ),
    "columns.parquet": (
        lambda path: write_parquet(path, [{"query": "a", "reply": "b"}]),
        "has only the columns 'query', 'r",
    ),
    "columns.csv": (lambda path: path.write_text("query,reply\na,b\n"), "has only the columns 'query', 'reply'"),
    "twice.csv": (lambda path: path.write_text("text,text\na,b\n"), "has a column twice"),
    "quote.csv": (lambda path: path.write_text('text\n"a"b\n'), "not CSV: "),
    "fields.csv": (lambda path: path.write_text("text\na,b\n"), "2 fields for 1 columns"),
    "latin.csv": (lambda path: path.write_bytes(b"text\n\xe9\n"), "not UTF-8 after line"),
    "nothing.csv": (lambda path: path.write_text(""), "has only the columns none"),
    "nothing.json": (lambda path: path.write_text("[]"), "contains no sample"),
    "nothing.jsonl": (lambda path: path.write_text("\ufeff\n \n"), "contains no sample|not JSON"),
    "zeros.jsonl": (lambda path: path.write_bytes(bytes(4096)), "contains NUL bytes"),
    "loop.jsonl": (lambda path: path.symlink_to(path.name), "is a broken link"),
    "dangling.jsonl": (lambda path: path.symlink_to("gone"), "is a broken link"),
    "folder.jsonl": (lambda path: path.mkdir(), "is not a file but a folder"),
    "pipe.jsonl": (lambda path: os.mkfifo(path), "a pipe or a device"),
    "zero.jsonl": (lambda path: path.symlink_to("/dev/zero"), "a pipe or a device"),
    "memory.jsonl": (lambda path: path.symlink_to("/proc/self/mem"), "cannot be read: "),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_refuses_damaged_files(name, tmp_path):
    write, says = HOSTILE[name]
    write(tmp_path / name)
    started = time.monotonic()
    with pytest.raises(UserError, match=says) as refused:
        samples.read_samples(tmp_path / name)
    assert time.monotonic() - started < 3
    assert name in str(refused.value)


def test_refuses_unreadable_file(tmp_path):
    (tmp_path / "secret.jsonl").write_text('{"text": "a"}')
    (tmp_path / "secret.jsonl").chmod(0)
    if os.geteuid():
        with pytest.raises(UserError, match="cannot be read: Permission denied"):
            samples.read_samples(tmp_path / "secret.jsonl")
        return
    for folder in (tmp_path, *tmp_path.parents):  # xdist has a folder more, and pytest's own are closed to others
        if not folder.stat().st_mode & 0o001:
            folder.chmod(0o755)
    assert "secret.jsonl cannot be read: Permission denied" in as_nobody(
        lambda: samples.read_samples(tmp_path / "secret.jsonl")
    )


def as_nobody(call):
    """Return the message of the UserError that a call raises as user nobody."""
    end, begin = os.pipe()
    if not os.fork():
        os.setuid(65534)
        try:
            call()
        except UserError as error:
            os.write(begin, str(error).encode())
        os._exit(0)
    os.close(begin)
    with open(end) as answer:
        return answer.read()


def test_refuses_file_that_changes_while_reading(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(LINES)
    read = rows.read_rows(path)
    next(read)
    with path.open("ab") as stream:
        stream.write(b'\n{"text": "more"}')
    with pytest.raises(UserError, match="changed while it was read"):
        list(read)
    read = rows.read_rows(path)
    next(read)
    path.unlink()
    with pytest.raises(UserError, match="changed while it was read"):
        list(read)


def test_endless_line_is_one_bad_line(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MAX_ROW", 1000)
    path = tmp_path / "long.jsonl"
    path.write_text('{"text": "a"}\n{"text": "' + "x" * 5000 + '"}\n{"text": "b"}\n')
    bad = samples.BadLines(samples.ReadOptions(skip=True))
    assert [sample.line for sample in samples.stream_samples([path], bad)] == [1, 3]
    assert bad.summary == "1 x longer than N MiB"


def test_names_the_missing_library(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match="the Python package pyarrow is required"):
        samples.read_samples(tmp_path / "a.parquet")


GROWTH = """
import resource, sys
from pathlib import Path
from superpod.weights.finetuning import packed_data
from superpod.data.samples import samples
from superpod.weights.finetuning.packed_data import DataOptions
import pyarrow, pyarrow.parquet
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
packed_data.check_data(DataOptions((sys.argv[1],)))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["big.jsonl", "big.jsonl.gz", "big.json", "big.parquet"])
def test_streams_large_files(name, tmp_path):
    path = tmp_path / name

    def row(at):
        return json.dumps({"prompt": f"{at:09} " + "two and two " * 60, "completion": "four " * 60})

    count = 64 * 2**20 // len(row(0))
    if name == "big.parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        texts = [f"{at} {row(at)}" for at in range(count)]
        table = arrow.table({"prompt": texts, "completion": texts})
        parquet.write_table(table, path, row_group_size=2000, use_dictionary=False, compression="none")
    else:
        with gzip.open(path, "wt", compresslevel=1) if name.endswith(".gz") else path.open("w") as out:
            out.write("[" if name == "big.json" else "")
            end = "," if name == "big.json" else "\n"
            out.writelines(f"{row(at)}{end}" for at in range(count - 1))
            out.write(row(count) + ("]" if name == "big.json" else "\n"))
    command = [sys.executable, "-W", "ignore", "-c", GROWTH, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 30 * 1024  # KiB, for 64 MiB
