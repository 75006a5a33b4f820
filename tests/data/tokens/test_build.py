import errno
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="the [nemo] extra is not installed")

from superpod.data.folder import DataFolder
from superpod.data.tokens import indexed, shards, worker_pool
from superpod.data.tokens.build import Report, build
from superpod.data.tokens.build_options import BuildOptions
from superpod.errors import UserError

OPTIONS = BuildOptions(vocab_size=300, split="80,10,10")


def content(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def decoded(folder: Path) -> list[str]:
    """Return the documents of a built folder in order, and check their end-of-document tokens."""
    from tokenizers import Tokenizer

    prefix = DataFolder.load(folder, verify_sha=True).prefix_paths[0]
    tokens = memoryview(indexed.bin_path(prefix).read_bytes()).cast("H").tolist()
    tokenizer, texts, at = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json")), [], 0
    for length in indexed.read_lengths(prefix):
        assert tokens[at + length - 1] == 0
        texts.append(tokenizer.decode(tokens[at : at + length - 1], skip_special_tokens=False))
        at += length
    return texts


def test_contains_every_document_once(built: Path, corpus: Path):
    texts = decoded(built)
    originals = [file.read_text() for file in sorted(corpus.iterdir())]
    assert sorted(texts) == sorted(originals)
    assert texts != originals, "the held-out documents must not be the last in the alphabet"
    assert sorted(p.name for p in built.iterdir()) == ["dataset.json", "text.bin", "text.idx", "tokenizer"]


@pytest.mark.parametrize(("workers", "shard_bytes"), [(1, None), (3, 4000)])
def test_build_is_reproducible(
    built: Path, corpus: Path, tmp_path: Path, workers: int, shard_bytes: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("superpod.data.tokens.build._JOB_FILES", 1)  # many small jobs, that end in any order
    report = build([f"{corpus}/*.txt"], tmp_path / "out", OPTIONS, workers=workers, shard_bytes=shard_bytes)
    assert report.shards == (1 if shard_bytes is None else 14)
    assert content(tmp_path / "out") == content(built)


def test_removes_duplicate_documents(corpus: Path, tmp_path: Path):
    """Duplicates may be copies, links, rows or compressed files."""
    texts = [file.read_text() for file in sorted(corpus.iterdir())]
    shutil.copyfile(corpus / "000.txt", tmp_path / "copy.txt")
    (tmp_path / "link.txt").symlink_to(corpus / "001.txt")
    rows = "".join(json.dumps({"text": text}) + "\n" for text in (*texts[:5], *texts[:5], "a new document"))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    patterns = [f"{corpus}/*.txt", f"{tmp_path}/*.txt", f"{tmp_path}/rows.*"]
    report = build(patterns, tmp_path / "out", OPTIONS, workers=1, shard_bytes=4000)
    assert sorted(decoded(tmp_path / "out")) == sorted([*texts, "a new document"])
    assert report.duplicates == 1 + 1 + 10 + 11
    assert report.folder.documents == 41
    assert report.folder.tokens == sum(indexed.read_lengths(report.folder.prefix_paths[0]))


def test_seed_changes_order(built: Path, corpus: Path, tmp_path: Path):
    build([f"{corpus}/*.txt"], tmp_path / "out", BuildOptions(300, split="80,10,10", seed=7), workers=1)
    assert sorted(decoded(tmp_path / "out")) == sorted(decoded(built))
    assert decoded(tmp_path / "out") != decoded(built)


def test_up_to_date(built: Path, corpus: Path):
    before = {f: f.stat().st_mtime_ns for f in built.rglob("*")}
    report = build([f"{corpus}/*.txt"], built, OPTIONS, workers=1)
    assert report.up_to_date
    assert {f: f.stat().st_mtime_ns for f in built.rglob("*")} == before


def test_removes_work_folder_of_finished_build(built: Path, corpus: Path, tmp_path: Path):
    """The earlier build stopped after it wrote dataset.json, before it removed the work folder."""
    shutil.copytree(built, tmp_path / "out")
    (tmp_path / "out" / ".partial").mkdir()
    (tmp_path / "out" / ".partial" / "000000.bin").write_bytes(b"")
    assert build([f"{corpus}/*.txt"], tmp_path / "out", OPTIONS, workers=1).up_to_date
    assert content(tmp_path / "out") == content(built)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            "0*.txt",
            BuildOptions(vocab_size=301, split="80,10,10"),
            "is complete, but was built from different text",
        ),
        ("00*.txt", OPTIONS, "is complete, but was built from different text or options"),
        ("0*.txt", BuildOptions(vocab_size=300, split="8,1,1"), "has split 80,10,10, not 8,1,1"),
    ],
)
def test_refuses_to_overwrite_finished_folder(
    built: Path, corpus: Path, text: str, options: BuildOptions, message: str
):
    before = content(built)
    with pytest.raises(UserError, match=message) as caught:
        build([f"{corpus}/{text}"], built, options, workers=1)
    assert "another --out" in caught.value.hint
    assert content(built) == before


@pytest.mark.parametrize("name", ["notes.txt", ".partial/mine", ".hidden"])
def test_refuses_folder_with_other_files(corpus: Path, tmp_path: Path, name: str):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match="contains other files: "):
        build([f"{corpus}/*.txt"], tmp_path, OPTIONS, workers=1)
    assert (tmp_path / name).read_text() == "mine"
    with pytest.raises(UserError, match="is a file, not a folder"):
        build([f"{corpus}/*.txt"], tmp_path / name, OPTIONS, workers=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (BuildOptions(), "one of --vocab-size and --tokenizer is required, not neither"),
        (BuildOptions(300, Path()), "one of --vocab-size and --tokenizer is required, not both"),
        (BuildOptions(257), "--vocab-size is 257; it must be between 258"),
        (BuildOptions(300, split="1,2"), "split '1,2' must be three numbers"),
        (BuildOptions(300, seed=-1), "--seed is -1; it must be between"),
        (BuildOptions(tokenizer=Path("/no/such")), "--tokenizer /no/such does not exist"),
        (BuildOptions(tokenizer=Path(__file__).parent), "contains no tokenizer"),
    ],
)
def test_refuses_impossible_options(tmp_path: Path, options: BuildOptions, message: str):
    with pytest.raises(UserError, match=message) as caught:
        build(["stdlib"], tmp_path / "out", options)
    assert caught.value.hint
    assert not (tmp_path / "out").exists()


def _raw(tmp_path: Path, **files: bytes) -> str:
    (tmp_path / "in").mkdir(exist_ok=True)
    for name, raw in files.items():
        (tmp_path / "in" / name.replace("_", ".")).write_bytes(raw)
    return f"{tmp_path}/in/*"


def _build(tmp_path: Path, glob: str, split: str = "1,0,0", **more: bool | int) -> Report:
    return build([glob], tmp_path / "out", BuildOptions(300, split=split), workers=1, **more)  # type: ignore[arg-type]


def test_skips_files_that_are_not_utf8(tmp_path: Path):
    bad = {f"latin{number}_txt": b"caf\xe9" for number in range(7)}
    report = _build(tmp_path, _raw(tmp_path, a_txt=b"abc", b_txt=b"", c_jsonl=b'{"text": " "}\n{"text": "x"}', **bad))
    assert (report.folder.documents, len(report.skipped), report.empty) == (2, 7, 2)
    assert report.notes[-1].startswith("skipped 7: ")
    assert report.notes[-1].endswith("latin4.txt and 2 more are not UTF-8")
    assert any("vocabulary of 300; the tokenizer has 258 ids" in note for note in report.notes)
    assert sorted(decoded(tmp_path / "out")) == ["abc", "x"]


def test_strict_refuses_files_that_are_not_utf8(tmp_path: Path):
    glob = _raw(tmp_path, a_txt=b"abc", b_txt=b"\xff")
    with pytest.raises(UserError, match=r"in/b\.txt is not UTF-8") as caught:
        _build(tmp_path, glob, strict=True)
    assert "--strict" in caught.value.hint
    _build(tmp_path, glob)
    with pytest.raises(UserError, match=r"in/b\.txt is not UTF-8"):
        _build(tmp_path, glob, strict=True)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"--text .*/in/\* matches no file"),
        ({"a_txt": b"", "b_txt": b""}, r"--text .*/in/\*: all 2 UTF-8 files are empty"),
        ({"a_txt": b"\xff"}, r"--text .*/in/\*: all 0 UTF-8 files are empty"),
        ({"a_txt": b" \n", "b_jsonl": b'{"text": ""}\n'}, r"all 2 documents are blank"),
        ({"a_jsonl": b'{"text": "a"}\nx'}, r"a\.jsonl:2: not JSON"),
    ],
)
def test_refuses_empty_or_invalid_input(tmp_path: Path, files: dict[str, bytes], message: str):
    with pytest.raises(UserError, match=message):
        _build(tmp_path, _raw(tmp_path, **files))
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_refuses_too_few_documents_for_the_split(tmp_path: Path):
    glob, notes = _raw(tmp_path, a_txt=b"abc", b_txt=b"abd", c_txt=b"abe", d_txt=b"x"), []
    with pytest.raises(UserError, match="split 969,30,1 of 4 documents leaves none for validation and test") as caught:
        _build(tmp_path, glob, split="969,30,1")
    assert "--split 2,1,1" in caught.value.hint
    report = build([glob], tmp_path / "out", BuildOptions(300), workers=1, note=notes.append)
    assert report.folder.split == "2,1,1"
    assert report.folder.split_documents() == {"train": 2, "validation": 1, "test": 1}
    assert notes == ["resumed: 1 of 1 shards were already finished"]


def test_unusual_file_names(tmp_path: Path):
    out = tmp_path / "o 'u\"t\n[red]"
    (tmp_path / "i 'n\"\n[b]").mkdir()
    (tmp_path / "i 'n\"\n[b]" / "a b\n.txt").write_text("abc")
    os.symlink(tmp_path / "i 'n\"\n[b]" / "a b\n.txt", tmp_path / "i 'n\"\n[b]" / "bad\udcff.txt")
    (tmp_path / "i 'n\"\n[b]" / "other.txt").write_text("abd")
    build([f"{tmp_path}/i 'n*/*.txt"], out, BuildOptions(300, split="1,1,0"), workers=1)
    assert sorted(decoded(out)) == ["abc", "abd"]


def test_copies_existing_tokenizer(built: Path, corpus: Path, tmp_path: Path):
    options = BuildOptions(tokenizer=built / "tokenizer", split="80,10,10")
    build([f"{corpus}/*.txt"], tmp_path / "out", options, workers=1)
    ours, theirs = content(tmp_path / "out"), content(built)
    assert {k: v for k, v in ours.items() if k != "dataset.json"} == {
        k: v for k, v in theirs.items() if k != "dataset.json"
    }


def test_tokenizes_long_texts_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards, "_MAX_CHARACTERS", 10)
    parts = ["ab\ncd\n", "efgh\n", "ijklmnopqr", "stuvw"]
    assert list(shards._split_long_text("".join(parts))) == parts


@pytest.mark.parametrize(
    "facts",
    [
        "",
        "[]",
        '{"documents": 2, "tokens": 5}',
        '{"documents": 1, "tokens": 6, "empty": 0}',
        '{"documents": 2, "tokens": 6, "empty": 0}',
    ],
)
def test_finished_shard_must_be_consistent(tmp_path: Path, facts: str):
    with indexed.Writer(tmp_path / "s", vocab=300) as out:
        out.add([1, 2])
        out.add([3, 4, 5])
    (tmp_path / "s.json").write_text('{"documents": 2, "tokens": 5, "empty": 1}')
    assert shards.read_finished(str(tmp_path / "s")) == shards.ShardDone(2, 5, 1)
    (tmp_path / "s.json").write_text(facts)
    assert shards.read_finished(str(tmp_path / "s")) is None


def test_workers_ignore_interrupts():
    """SIGINT is blocked from the start of the process, so that imports are not interrupted either."""
    with worker_pool.start_workers(2) as run:
        ((_, blocked),) = run(partial(signal.pthread_sigmask, signal.SIG_BLOCK), [()])
    assert signal.SIGINT in blocked
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_reports_dead_worker():
    with (
        pytest.raises(UserError, match="one of 1 worker processes died") as caught,
        worker_pool.start_workers(1) as run,
    ):
        list(run(os._exit, [9]))
    assert "fewer --workers" in caught.value.hint


DRIVER = """
import sys
from superpod.data.tokens.build import build
from superpod.data.tokens.build_options import BuildOptions
if __name__ == "__main__":
    try:
        build([sys.argv[1]], sys.argv[2], BuildOptions(vocab_size=300), workers=2, shard_bytes=10_000)
    except KeyboardInterrupt:
        sys.exit(130)
"""


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _interrupted(text: str, out: Path, how: Callable[[int], None]) -> subprocess.CompletedProcess[str]:
    """Start a build, stop it with `how`(process group) after 3 shards, and wait for its processes."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, text, str(out)], start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    while len(list(out.glob(".partial/*[0-9].json"))) < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    how(process.pid)
    output, errors = process.communicate(timeout=30)  # ends when no child holds the pipes any more
    deadline = time.monotonic() + 10
    while _alive(process.pid):
        assert time.monotonic() < deadline, "a worker outlived the build"
        time.sleep(0.02)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@pytest.mark.slow
def test_resumes_after_kill(write_corpus: Callable[..., Path], tmp_path: Path):
    text = f"{write_corpus(tmp_path / 'in', files=60, words=2500)}/*.txt"
    out, whole, notes = tmp_path / "out", tmp_path / "whole", []
    killed = _interrupted(text, out, lambda pid: os.kill(pid, signal.SIGKILL))
    assert killed.returncode == -signal.SIGKILL
    assert sorted(p.name for p in out.iterdir()) == [".partial"]

    stopped = _interrupted(text, whole, lambda pid: os.killpg(pid, signal.SIGINT))
    assert (stopped.returncode, stopped.stdout, stopped.stderr) == (130, "", "")

    torn = out / ".partial" / "000001.bin"  # what a crash of the machine can leave of a finished shard
    torn.write_bytes(torn.read_bytes()[:-2])
    report = build([text], out, BuildOptions(vocab_size=300), workers=2, shard_bytes=10_000, note=notes.append)
    assert 2 <= report.resumed < report.shards == 60
    assert notes == [f"resumed: {report.resumed} of 60 shards were already finished"]

    notes.clear()
    report = build([text], whole, BuildOptions(vocab_size=301), workers=2, note=notes.append)
    assert report.resumed == 0
    assert notes == ["the unfinished build in this folder used different text or options; starting over"]
    build([text], tmp_path / "once", BuildOptions(vocab_size=300), workers=2)
    assert content(out) == content(tmp_path / "once")
    assert content(out) != content(whole)


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_resumes_between_the_last_renames(
    built: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: int
):
    from superpod.data.tokens.unfinished import UnfinishedBuild

    real, out = UnfinishedBuild.publish, tmp_path / "out"

    def broken(self: UnfinishedBuild, paths: list[Path]) -> None:
        real(self, paths[:moved])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(UnfinishedBuild, "publish", broken)
        with pytest.raises(KeyboardInterrupt):
            build([f"{corpus}/*.txt"], out, OPTIONS, workers=1)
    assert not (out / "dataset.json").exists()
    assert build([f"{corpus}/*.txt"], out, OPTIONS, workers=1).resumed == 1
    assert content(out) == content(built)


def test_resumes_after_full_disk(built: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(indexed, "_flush_to_disk", full)  # as the last write of the merge, in this process
        with pytest.raises(OSError, match=r"the disk is full .*; free some space") as caught:
            build([f"{corpus}/*.txt"], out, OPTIONS, workers=1)
    assert caught.value.errno == errno.ENOSPC
    assert sorted(p.name for p in out.iterdir()) == [".partial"]
    assert build([f"{corpus}/*.txt"], out, OPTIONS, workers=1).resumed == 1
    assert content(out) == content(built)


def test_refuses_simultaneous_builds(corpus: Path, tmp_path: Path):
    import fcntl

    (tmp_path / "out" / ".partial").mkdir(parents=True)
    with open(tmp_path / "out" / ".partial" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another build is writing"):
            build([f"{corpus}/*.txt"], tmp_path / "out", OPTIONS, workers=1)


def test_progress_reaches_total(corpus: Path, tmp_path: Path):
    seen: dict[str, list[tuple[int, int]]] = {}
    build(
        [f"{corpus}/*.txt"], tmp_path / "out", OPTIONS, workers=2, shard_bytes=9000,
        progress=lambda phase, done, total: seen.setdefault(phase, []).append((done, total)),
    )  # fmt: skip
    assert list(seen) == ["read", "tokenizer", "encode", "write"]
    for phase in ("read", "encode", "write"):
        assert seen[phase] == sorted(seen[phase])
        assert seen[phase][-1][0] == seen[phase][-1][1] > 0


def test_records_source(built: Path):
    source = json.loads((built / "dataset.json").read_text())["source"]
    keys = ("files", "skipped", "empty", "vocab_size", "seed")
    assert tuple(source[key] for key in keys) == (40, 0, 0, 300, 1234)
