"""From `--text` to documents: find the files, cut them into pieces, read their texts."""

import codecs
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from superpod.data.readers import dataset_folder, rows
from superpod.errors import UserError

STDLIB = "stdlib"
"""`--text stdlib`: the .py files of this Python's standard library, without site-packages and tests (12 MB)."""
JSON_LINES = (".jsonl", ".ndjson")
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Source:
    """One input file as scanned: `size` in bytes, hex `sha256` of its content, whether it is UTF-8."""

    path: str
    size: int
    sha256: str
    utf8: bool

    @property
    def is_lines(self) -> bool:
        """Whether every line is a JSON document (by the file's ending)."""
        return self.path.endswith(JSON_LINES)


@dataclass(frozen=True)
class Piece:
    """Bytes [start, end) of a file: a whole text file, or the lines of a JSON-lines file that begin there."""

    path: str
    start: int
    end: int
    size: int
    is_lines: bool


def _is_rows(path: str) -> bool:
    """Whether the file is read by `rows`: a table, or compressed JSON lines."""
    compressed = path.endswith(tuple(lines + packed for lines in JSON_LINES for packed in rows.PACKED))
    return compressed or rows.format_of(Path(path)) in ("parquet", "arrow")


Bad = Callable[[str, int, str, str], None]
"""bad(file, line, reason, text) takes a line that is no document."""


def shown(path: str) -> str:
    """A file name that is safe to print on one line: quoted and escaped when it holds anything odd."""
    return path if path.isprintable() and path == path.strip() else repr(path)


def find(patterns: Iterable[str], outside: Path) -> list[str]:
    """Absolute paths of the files that the patterns name, sorted, without repeats and without those below `outside`.

    A pattern is a file, a glob (`**` for any depth) or the word "stdlib".

    Raises:
        UserError: a pattern that matches no file.
    """
    files: set[str] = set()
    for pattern in patterns:
        if not pattern.strip():
            raise UserError("--text is empty", _GLOB)
        matches = [path for path in map(os.path.abspath, _matches(pattern)) if os.path.isfile(path)]
        if is_saved(pattern):
            matches = [str(file) for file in dataset_folder.splits(Path(os.path.abspath(pattern))).get("train", ())]
        kept = [path for path in matches if not Path(path).is_relative_to(outside)]
        if not matches and os.path.exists(pattern) and not os.path.isdir(pattern):
            raise UserError(f"--text {shown(pattern)} is no regular file", "write what it gives into a file first")
        if not kept:
            hint = f"a folder is not read by itself: --text '{pattern}/**/*.txt'" if os.path.isdir(pattern) else _GLOB
            raise UserError(f"--text {shown(pattern)} matches no file", hint)
        files.update(kept)
    return sorted(files, key=os.fsencode)  # by bytes: names may hold half a surrogate pair


def is_saved(folder: str) -> bool:
    """Whether `save_to_disk` of Hugging Face's datasets wrote a folder."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in ("dataset_dict.json", "state.json"))


def _matches(pattern: str) -> list[str]:
    if pattern == STDLIB:
        root = sysconfig.get_path("stdlib")
        files = glob.glob("**/*.py", root_dir=root, recursive=True)
        return [os.path.join(root, file) for file in files if not _NOT_STDLIB.intersection(Path(file).parts)]
    if os.path.lexists(pattern):
        return [pattern]
    return glob.glob(os.path.expanduser(pattern), recursive=True)


def scan(paths: list[str]) -> list[Source]:
    """Size, digest and encoding of files, which are read whole; UserError when one cannot be read."""
    return [_scan(path) for path in paths]


def _scan(path: str) -> Source:
    decoder, digest, size, utf8 = codecs.getincrementaldecoder("utf-8")(), hashlib.sha256(), 0, True
    try:
        with open(path, "rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
                size += len(block)
                utf8 = utf8 and _decodes(decoder, block)
    except OSError as error:
        raise UserError(f"cannot read {shown(path)}: {error.strerror}", "fix it, or leave it out of --text") from None
    return Source(path, size, digest.hexdigest(), _is_rows(path) or (utf8 and _decodes(decoder, b"", final=True)))


def _decodes(decoder: codecs.IncrementalDecoder, block: bytes, final: bool = False) -> bool:
    try:
        decoder.decode(block, final)
    except UnicodeDecodeError:
        return False
    return True


def plan(sources: list[Source], shard_bytes: int) -> list[tuple[Piece, ...]]:
    """Cut the sources, in order, into shards of about `shard_bytes`; the same input always gives the same plan.

    A text file stays whole, because it is one document; JSON-lines files are cut where needed.
    """
    shards: list[tuple[Piece, ...]] = []
    shard: list[Piece] = []
    for piece in (piece for source in sources for piece in _pieces(source, shard_bytes)):
        shard.append(piece)
        if sum(part.end - part.start for part in shard) >= shard_bytes:
            shards.append(tuple(shard))
            shard = []
    return [*shards, tuple(shard)] if shard else shards


def _pieces(source: Source, shard_bytes: int) -> Iterator[Piece]:
    step = shard_bytes if source.is_lines else max(source.size, 1)
    for start in range(0, source.size, step):
        yield Piece(source.path, start, min(start + step, source.size), source.size, source.is_lines)


def read(piece: Piece, json_key: str, bad: Bad | None = None) -> Iterator[str]:
    """The documents of a piece, blank ones as "" (blank lines of a JSON-lines file are left out).

    With `bad`, lines that are no documents go there instead of ending the reading.

    Raises:
        UserError: a line (named) that is not a JSON object with a string at `json_key`, or a file that changed since
            it was scanned.
    """
    changed = UserError(f"{shown(piece.path)} changed during the build", "run the same command again")
    try:
        with open(piece.path, "rb") as stream:
            if os.fstat(stream.fileno()).st_size != piece.size:
                raise changed
            if _is_rows(piece.path):
                yield from _rows(piece, json_key, bad)
            elif piece.is_lines:
                yield from _lines(stream, piece, json_key, bad)
            else:
                text = stream.read().decode("utf-8-sig")
                yield text if text.strip() else ""
    except (FileNotFoundError, UnicodeDecodeError):
        raise changed from None


def _rows(piece: Piece, json_key: str, bad: Bad | None) -> Iterator[str]:
    for row in rows.read(Path(piece.path), (json_key,)):
        try:
            if row.problem:
                raise ValueError(row.problem)
            yield _text(row.value, json_key)
        except ValueError as problem:
            _refuse(piece.path, row.number, str(problem), row.text, json_key, bad)


def _refuse(path: str, number: int, problem: str, text: str, json_key: str, bad: Bad | None) -> None:
    if bad:
        bad(path, number, problem, text)
        return
    hint = f"each line is an object such as {json.dumps({json_key: '...'})}; --json-key names another key"
    raise UserError(f"{shown(path)}:{number}: {problem}", f"{hint}; --skip-bad-lines leaves such lines out")


def _lines(stream: BinaryIO, piece: Piece, json_key: str, bad: Bad | None) -> Iterator[str]:
    number = _LineNumber(piece.path)
    if piece.start:  # a line belongs to the piece in which it begins
        stream.seek(piece.start - 1)
        stream.readline()
    while (at := stream.tell()) < piece.end and (line := stream.readline()):
        if not line.strip():
            continue
        try:
            yield _document(line.decode("utf-8-sig" if at == 0 else "utf-8"), json_key)
        except ValueError as problem:
            _refuse(piece.path, number.at(at), str(problem), line.decode("utf-8", "backslashreplace"), json_key, bad)


def _document(line: str, json_key: str) -> str:
    try:
        row = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("brackets or braces nested too deeply") from None
    return _text(row, json_key)


def _text(row: object, json_key: str) -> str:
    if not isinstance(row, dict) or json_key not in row:
        have = f"only {', '.join(map(repr, list(row)[:5]))}" if row and isinstance(row, dict) else "no object"
        raise ValueError(f"no key {json_key!r}, {have}")
    text = row[json_key]
    if not isinstance(text, str):
        raise ValueError(f"key {json_key!r} holds {type(text).__name__}, not a string")
    try:
        text.encode()  # JSON may spell half a surrogate pair, which no tokenizer takes
    except UnicodeEncodeError as error:
        raise ValueError(f"key {json_key!r} holds half a surrogate pair, {text[error.start]!r}") from None
    return text if text.strip() else ""


class _LineNumber:
    """A piece knows its place in bytes only; lines are counted for messages, on from the last one."""

    def __init__(self, path: str) -> None:
        self._path, self._offset, self._number = path, 0, 1

    def at(self, offset: int) -> int:
        """The number of the line that begins at a byte; offsets rise from call to call."""
        with open(self._path, "rb") as stream:
            stream.seek(self._offset)
            while self._offset < offset and (block := stream.read(min(offset - self._offset, _BLOCK))):
                self._number, self._offset = self._number + block.count(b"\n"), self._offset + len(block)
        return self._number


_GLOB = "check the path; quote the glob so that the shell leaves it alone, and use ** for any depth"
