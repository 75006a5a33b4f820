"""Find the files of `--text`, divide them among shards, and read their documents."""

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
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Source:
    """A scanned input file: its `size` in bytes, the hex `sha256` of its content, and whether it is UTF-8."""

    path: str
    size: int
    sha256: str
    utf8: bool

    @property
    def is_lines(self) -> bool:
        """Whether every line is a JSON document, according to the suffix of the file."""
        return self.path.endswith(JSON_LINES)


@dataclass(frozen=True)
class Piece:
    """Bytes [start, end) of a file of `size` bytes: a complete text file, or the JSON lines that begin in it."""

    path: str
    start: int
    end: int
    size: int
    is_lines: bool


def _is_rows(path: str) -> bool:
    """Return whether `rows.read_rows` reads the file: a table, or compressed JSON lines."""
    is_compressed = path.endswith(tuple(lines + suffix for lines in JSON_LINES for suffix in rows.COMPRESSED))
    return is_compressed or rows.get_format(Path(path)) in ("parquet", "arrow")


BadLine = Callable[[str, int, str, str], None]
"""Function bad(file, line, reason, text) that is called for each line that is not a document."""


def escape_path(path: str) -> str:
    """Return a path for display: quoted and escaped if it has control characters, or leading or trailing spaces."""
    return path if path.isprintable() and path == path.strip() else repr(path)


def find_files(patterns: Iterable[str], excluded_folder: Path) -> list[str]:
    """Return the sorted absolute paths of the files that match the patterns, except those below `excluded_folder`.

    A pattern is a file, a glob (`**` for any depth) or "stdlib".

    Raises:
        UserError: a pattern matches no file.
    """
    files: set[str] = set()
    for pattern in patterns:
        if not pattern.strip():
            raise UserError("--text is empty", _GLOB)
        matches = [path for path in map(os.path.abspath, _expand_pattern(pattern)) if os.path.isfile(path)]
        if is_saved_dataset(pattern):
            splits = dataset_folder.find_splits(Path(os.path.abspath(pattern)))
            matches = [str(file) for file in splits.get("train", ())]
        kept_paths = [path for path in matches if not Path(path).is_relative_to(excluded_folder)]
        if not matches and os.path.exists(pattern) and not os.path.isdir(pattern):
            raise UserError(f"--text {escape_path(pattern)} is not a regular file", "write its content to a file first")
        if not kept_paths:
            hint = f"for a folder, pass a glob: --text '{pattern}/**/*.txt'" if os.path.isdir(pattern) else _GLOB
            raise UserError(f"--text {escape_path(pattern)} matches no file", hint)
        files.update(kept_paths)
    return sorted(files, key=os.fsencode)  # as bytes, because names may contain unpaired surrogates


def is_saved_dataset(folder: str) -> bool:
    """Return whether a folder was written by `save_to_disk` of Hugging Face's datasets."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in ("dataset_dict.json", "state.json"))


def _expand_pattern(pattern: str) -> list[str]:
    if pattern == STDLIB:
        root = sysconfig.get_path("stdlib")
        files = glob.glob("**/*.py", root_dir=root, recursive=True)
        return [os.path.join(root, file) for file in files if not _SKIPPED_FOLDERS.intersection(Path(file).parts)]
    if os.path.lexists(pattern):
        return [pattern]
    return glob.glob(os.path.expanduser(pattern), recursive=True)


def scan_files(paths: list[str]) -> list[Source]:
    """Return the sizes, digests and encodings of files. Raises UserError if a file cannot be read."""
    return [_scan_file(path) for path in paths]


def _scan_file(path: str) -> Source:
    decoder, digest, size, utf8 = codecs.getincrementaldecoder("utf-8")(), hashlib.sha256(), 0, True
    try:
        with open(path, "rb") as stream:
            for block in iter(lambda: stream.read(_BLOCK), b""):
                digest.update(block)
                size += len(block)
                utf8 = utf8 and _is_valid_utf8(decoder, block)
    except OSError as error:
        message = f"{escape_path(path)} cannot be read: {error.strerror}"
        raise UserError(message, "make it readable, or remove it from --text") from None
    return Source(path, size, digest.hexdigest(), _is_rows(path) or (utf8 and _is_valid_utf8(decoder, b"", final=True)))


def _is_valid_utf8(decoder: codecs.IncrementalDecoder, block: bytes, final: bool = False) -> bool:
    try:
        decoder.decode(block, final)
    except UnicodeDecodeError:
        return False
    return True


def plan_shards(sources: list[Source], shard_bytes: int) -> list[tuple[Piece, ...]]:
    """Divide the sources, in order, into shards of about `shard_bytes` bytes. Each shard is a tuple of pieces.

    JSON lines files are divided; a text file is one document and is not. The result depends only on the arguments.
    """
    shards: list[tuple[Piece, ...]] = []
    shard: list[Piece] = []
    for piece in (piece for source in sources for piece in _split_source(source, shard_bytes)):
        shard.append(piece)
        if sum(part.end - part.start for part in shard) >= shard_bytes:
            shards.append(tuple(shard))
            shard = []
    return [*shards, tuple(shard)] if shard else shards


def _split_source(source: Source, shard_bytes: int) -> Iterator[Piece]:
    step = shard_bytes if source.is_lines else max(source.size, 1)
    for start in range(0, source.size, step):
        yield Piece(source.path, start, min(start + step, source.size), source.size, source.is_lines)


def read_documents(piece: Piece, json_key: str, bad: BadLine | None = None) -> Iterator[str]:
    """Yield the text of each document of a piece, "" for a blank document. Blank lines of JSON lines are skipped.

    Args:
        piece: range of a file.
        json_key: key of the text in JSON lines, or its column in tables.
        bad: called for each line that is not a document; None to raise an error instead.

    Raises:
        UserError: a line is not a JSON object with a string at `json_key`, or the file has changed since its scan.
    """
    changed = UserError(f"{escape_path(piece.path)} changed during the build", "run the same command again")
    try:
        with open(piece.path, "rb") as stream:
            if os.fstat(stream.fileno()).st_size != piece.size:
                raise changed
            if _is_rows(piece.path):
                yield from _read_table(piece, json_key, bad)
            elif piece.is_lines:
                yield from _read_json_lines(stream, piece, json_key, bad)
            else:
                text = stream.read().decode("utf-8-sig")
                yield text if text.strip() else ""
    except (FileNotFoundError, UnicodeDecodeError):
        raise changed from None


def _read_table(piece: Piece, json_key: str, bad: BadLine | None) -> Iterator[str]:
    for row in rows.read_rows(Path(piece.path), (json_key,)):
        try:
            if row.problem:
                raise ValueError(row.problem)
            yield _get_text(row.value, json_key)
        except ValueError as problem:
            _report_bad_line(piece.path, row.number, str(problem), row.text, json_key, bad)


def _report_bad_line(path: str, number: int, problem: str, text: str, json_key: str, bad: BadLine | None) -> None:
    """Pass a bad line to `bad`; raise UserError if it is None."""
    if bad:
        bad(path, number, problem, text)
        return
    hint = f"each line must be an object such as {json.dumps({json_key: '...'})}; --json-key selects another key"
    raise UserError(f"{escape_path(path)}:{number}: {problem}", f"{hint}; --skip-bad-lines skips such lines")


def _read_json_lines(stream: BinaryIO, piece: Piece, json_key: str, bad: BadLine | None) -> Iterator[str]:
    number = _LineCounter(piece.path)
    if piece.start:  # a line belongs to the piece in which it begins
        stream.seek(piece.start - 1)
        stream.readline()
    offset = stream.tell()
    while offset < piece.end:
        line = stream.readline()
        if not line:
            return
        if line.strip():
            try:
                yield _parse_document(line.decode("utf-8-sig" if offset == 0 else "utf-8"), json_key)
            except ValueError as problem:
                text = line.decode("utf-8", "backslashreplace")
                _report_bad_line(piece.path, number.find_line(offset), str(problem), text, json_key, bad)
        offset = stream.tell()


def _parse_document(line: str, json_key: str) -> str:
    try:
        row = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("brackets or braces are nested too deeply") from None
    return _get_text(row, json_key)


def _get_text(row: object, json_key: str) -> str:
    if not row or not isinstance(row, dict):
        raise ValueError(f"not a JSON object with the key {json_key!r}")
    if json_key not in row:
        raise ValueError(f"no key {json_key!r}, only {', '.join(map(repr, list(row)[:5]))}")
    text = row[json_key]
    if not isinstance(text, str):
        raise ValueError(f"key {json_key!r} is of type {type(text).__name__}, not a string")
    try:
        text.encode()  # JSON can contain unpaired surrogates, which tokenizers do not accept
    except UnicodeEncodeError as error:
        raise ValueError(f"key {json_key!r} contains an unpaired surrogate, {text[error.start]!r}") from None
    return text if text.strip() else ""


class _LineCounter:
    """Converts byte offsets to line numbers, because a piece knows only its offset in the file."""

    def __init__(self, path: str) -> None:
        self._path, self._offset, self._number = path, 0, 1

    def find_line(self, offset: int) -> int:
        """Return the number of the line that begins at byte `offset`, which must not decrease between calls."""
        with open(self._path, "rb") as stream:
            stream.seek(self._offset)
            while self._offset < offset:
                block = stream.read(min(offset - self._offset, _BLOCK))
                if not block:
                    break
                self._number += block.count(b"\n")
                self._offset += len(block)
        return self._number


_GLOB = "check the path; quote the glob to protect it from the shell, and use ** for any depth"
