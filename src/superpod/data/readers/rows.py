"""Stream the rows of a sample file: JSON lines, a JSON array, CSV, Parquet or Arrow, compressed or not.

A file is never loaded completely. Parquet, Arrow and .zst need pyarrow, which the [nemo] extra installs.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from superpod.data import paths
from superpod.data.readers import arrow_tables
from superpod.errors import UserError

MAX_ROW = 1 << 26
"""Maximum bytes of a line, an array element or a field; a larger one could exhaust the memory and is an error."""
_CHUNK = 1 << 20
_WHITESPACE = " \t\r\n"
FORMATS = {
    ".jsonl": "lines", ".ndjson": "lines", ".json": "lines", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet",
    ".arrow": "arrow",
}  # fmt: skip
"""Suffix -> format; all other suffixes are "lines". A file of lines that begins with [ is read as a JSON array."""
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_MAGIC = (
    (b"\x1f\x8b", "is a gzip file", "rename it to .gz"),
    (b"\x28\xb5\x2f\xfd", "is a Zstandard file", "rename it to .zst"),
    (b"PAR1", "is a Parquet file", "rename it to .parquet"),
    (b"ARROW1", "is an Arrow file", "rename it to .arrow"),
    (b"PK\x03\x04", "is a zip file", "unpack it first"),
    (b"\xff\xfe", "is UTF-16, not UTF-8", "convert it with `iconv -f utf-16 -t utf-8 FILE`"),
    (b"\xfe\xff", "is UTF-16, not UTF-8", "convert it with `iconv -f utf-16 -t utf-8 FILE`"),
)
LFS = b"version https://git-lfs.github.com/spec/"
"""First bytes of a Git LFS pointer."""


@dataclass(frozen=True)
class Row:
    """A row of a file: its number from 1, its value, its text, and the reason why it is invalid ("" if it is valid)."""

    number: int
    value: object
    text: str
    problem: str = ""


def get_format(path: Path) -> str:
    """Return the format of a file by its suffix: "lines", "csv", "parquet" or "arrow"."""
    name = path.name.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return FORMATS.get(os.path.splitext(name)[1], "lines")


def read_rows(path: Path, columns: Collection[str] = ()) -> Iterator[Row]:
    """Yield the rows of a file in order. Null fields of tables are omitted.

    Args:
        path: the file.
        columns: columns to read from a table; empty for all.

    Raises:
        UserError: the file cannot be read completely, changes while it is read, or does not match its suffix.
    """
    kind = get_format(path)
    with _require_unchanged(path):
        if kind in ("parquet", "arrow"):
            if _read_first_bytes(path).startswith(LFS):
                raise _build_lfs_error(path)
            for number, value in enumerate(arrow_tables.read_table(path, kind, columns), 1):
                yield Row(number, value, json.dumps(value, default=str, ensure_ascii=False))
            return
        with _translate_errors(path), _open_decompressed(path) as stream:
            yield from (_read_csv(path, stream, columns) if kind == "csv" else _read_json(path, stream))


def check_file(path: Path) -> None:
    """Raise UserError if a path is not a regular file or a link to one."""
    paths.check(path)
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        problem = f"is a broken link ({error.strerror})" if os.path.islink(path) else "is not a file"
        raise UserError(
            f"{paths.shorten(path)} {problem}", "pass a file with samples (for example chats.jsonl)"
        ) from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device, which can be read only once"
        raise UserError(f"{paths.shorten(path)} is not a file but {kind}", "save the samples to a file first")


@contextmanager
def _require_unchanged(path: Path) -> Iterator[None]:
    """Raise UserError if a file changes during the block, which would mix samples of two versions."""
    check_file(path)
    stat_before = os.stat(path)
    yield
    try:
        stat_after = os.stat(path)
    except FileNotFoundError:
        stat_after = None
    if not stat_after or (stat_before.st_size, stat_before.st_mtime_ns) != (stat_after.st_size, stat_after.st_mtime_ns):
        raise UserError(f"{paths.shorten(path)} changed while it was read", "wait until it is complete")


@contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    """Convert exceptions of reading and decompression to UserError."""
    import lzma
    import zlib

    try:
        yield
    except EOFError:
        raise UserError(f"{paths.shorten(path)} is truncated: its compressed data is incomplete", _COPY_AGAIN) from None
    except (OSError, zlib.error, lzma.LZMAError) as error:  # gzip.BadGzipFile is an OSError
        reason = getattr(error, "strerror", None) or paths.shorten(str(error))
        raise UserError(f"{paths.shorten(path)} cannot be read: {reason}", _COPY_AGAIN) from None


def _open_decompressed(path: Path) -> BinaryIO:
    import bz2
    import gzip
    import lzma

    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast("BinaryIO", gzip.open(path))
    if suffix == ".bz2":
        return cast("BinaryIO", bz2.open(path))
    if suffix == ".xz":
        return cast("BinaryIO", lzma.open(path))
    if suffix == ".zst":
        return arrow_tables.open_zstd(path)
    _check_magic(path)
    return open(path, "rb")


def _read_first_bytes(path: Path) -> bytes:
    with _translate_errors(path), open(path, "rb") as stream:
        return stream.read(64)


def _check_magic(path: Path) -> None:
    """Raise UserError if the first bytes of a file show that its format differs from its suffix."""
    first = _read_first_bytes(path)
    if first.startswith(LFS):
        raise _build_lfs_error(path)
    for magic, problem, hint in _MAGIC:
        if first.startswith(magic):
            raise UserError(f"{paths.shorten(path)} {problem}", hint)


def _build_lfs_error(path: Path) -> UserError:
    return UserError(f"{paths.shorten(path)} is a Git LFS pointer, not the data", "run `git lfs pull` or `hf download`")


def _read_json(path: Path, stream: BinaryIO) -> Iterator[Row]:
    """Yield the lines of a JSON lines file, or the elements of a JSON array if the first character is [."""
    first = b""
    for block in iter(lambda: stream.read(_CHUNK), b""):
        first = block.removeprefix(codecs.BOM_UTF8).lstrip()
        if first:
            break
    stream.seek(0)
    return _read_array(path, stream) if first.startswith(b"[") else _read_lines(stream)


def _read_lines(stream: BinaryIO) -> Iterator[Row]:
    for number, line in enumerate(iter(lambda: stream.readline(MAX_ROW + 1), b""), 1):
        if len(line) > MAX_ROW:
            _skip_rest_of_line(stream)
            text = line[:1000].decode("utf-8", "backslashreplace")
            yield Row(number, None, f"{text}...", f"longer than {MAX_ROW >> 20} MiB")
        elif line.strip():
            yield _parse_line(number, line)


def _skip_rest_of_line(stream: BinaryIO) -> None:
    rest_of_line = stream.readline(_CHUNK)
    while rest_of_line and not rest_of_line.endswith(b"\n"):
        rest_of_line = stream.readline(_CHUNK)


def _parse_line(number: int, line: bytes) -> Row:
    if number == 1:  # editors on Windows write a byte order mark
        line = line.removeprefix(codecs.BOM_UTF8)
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        line_text = line.decode("utf-8", "backslashreplace").rstrip("\r\n")
        return Row(number, None, line_text, f"not UTF-8 at byte {error.start}")
    text = text.strip()
    try:
        return Row(number, _parse_json(text), text)
    except _DuplicateKey as error:
        return Row(number, None, text, str(error))
    except (ValueError, RecursionError) as error:
        reason = "it contains NUL bytes, which is common after a crash" if "\0" in text else str(error)
        if not line.endswith(b"\n"):
            reason += " (the file ends here without a newline; it may be truncated)"
        return Row(number, None, text, f"not JSON: {reason}")


class _DuplicateKey(ValueError):
    """A JSON object has a key twice; JSON libraries would silently use the last value."""


def _build_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKey(f"has the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_build_object)


def _parse_json(text: str) -> object:
    return _DECODER.decode(text)


def _read_array(path: Path, stream: BinaryIO) -> Iterator[Row]:
    """Yield the elements of a JSON array one by one."""
    array = _JsonArrayReader(path, stream)
    array.skip("[")
    number = 0
    while not array.is_at_end():
        number += 1
        value, text, problem = array.next_element(number)
        yield Row(number, value, text, problem)


class _JsonArrayReader:
    """Decodes a JSON array from a stream, one element at a time."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path, self._stream = path, stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._buffer, self._at, self._complete = "", 0, False
        self._first = True

    def skip(self, mark: str) -> None:
        self._skip_blank()
        if not self._buffer.startswith(mark, self._at):
            raise self._error(f"{mark!r} expected")
        self._at += 1

    def is_at_end(self) -> bool:
        """Return whether the array ends at the current position; if not, skip the comma before the next element."""
        self._skip_blank()
        if self._buffer.startswith("]", self._at):
            self._at += 1
            self._skip_blank()
            if self._at < len(self._buffer):
                raise self._error("there is more text after the array")
            return True
        if not self._first:
            self.skip(",")
            self._skip_blank()
        self._first = False
        return False

    def next_element(self, number: int) -> tuple[object, str, str]:
        """Return (value, text, problem) of element `number`; the problem is "" unless an object has a key twice."""
        while True:
            try:
                value, end = _LENIENT_DECODER.raw_decode(self._buffer, self._at)
                if end == len(self._buffer) and self._read_more():  # a number may continue
                    continue
            except (ValueError, RecursionError) as error:
                if not isinstance(error, RecursionError) and len(self._buffer) < MAX_ROW and self._read_more():
                    continue
                raise self._error(f"element {number} is not JSON: {error}") from None
            text, self._at = self._buffer[self._at : end], end
            try:
                return _parse_json(text), text, ""
            except _DuplicateKey as error:
                return value, text, str(error)

    def _skip_blank(self) -> None:
        while True:
            while self._at < len(self._buffer) and self._buffer[self._at] in _WHITESPACE:
                self._at += 1
            if self._at < len(self._buffer) or not self._read_more():
                return

    def _read_more(self) -> bool:
        """Double the unread text in the buffer. Returns False at the end of the file."""
        if self._complete:
            return False
        unread_text = self._buffer[self._at :]
        block = self._stream.read(max(_CHUNK, len(unread_text)))
        self._complete = not block
        try:
            self._buffer, self._at = unread_text + self._decoder.decode(block, self._complete), 0
        except UnicodeDecodeError:
            raise self._error("it is not UTF-8") from None
        return not self._complete

    def _error(self, problem: str) -> UserError:
        message = f"{paths.shorten(self._path)}: {problem}"
        if self._complete and self._at >= len(self._buffer):
            message += " (the file ends inside the array; it may be truncated)"
        return UserError(message, "convert it to .jsonl with one sample per line; bad lines can then be skipped")


_LENIENT_DECODER = json.JSONDecoder()


def _read_csv(path: Path, stream: BinaryIO, columns: Collection[str]) -> Iterator[Row]:
    """Yield the rows of a CSV file as objects with the header as keys. A row has the number of its last line."""
    csv.field_size_limit(MAX_ROW)
    name = path.name.lower()
    reader = None
    try:
        with io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
            reader = csv.reader(text, delimiter="\t" if ".tsv" in name else ",", strict=True)
            header = next(reader, [])
            if len(set(header)) != len(header):
                raise UserError(f"{paths.shorten(path)} has a column twice: {', '.join(header)}", "rename one of them")
            arrow_tables.select_columns(path, header, columns)
            for fields in filter(None, reader):
                pairs = zip(header, fields, strict=False)
                value = {key: arrow_tables.parse_json_column(key, field) for key, field in pairs if field}
                problem = f"{len(fields)} fields for {len(header)} columns" if len(fields) != len(header) else ""
                yield Row(reader.line_num, value, ",".join(fields), problem)
    except csv.Error as error:
        location = f"{paths.shorten(path)}:{reader.line_num if reader else 1}"
        raise UserError(f"{location}: not CSV: {error}", 'quote fields with ""') from None
    except UnicodeDecodeError:
        line = reader.line_num if reader else 0
        raise UserError(f"{paths.shorten(path)}: not UTF-8 after line {line}", "convert it to UTF-8") from None


_COPY_AGAIN = "copy it again"
