"""Stream the rows of a file of samples: JSON lines, a JSON array, CSV, Parquet or Arrow, compressed or not.

A file is never read whole. Only Parquet, Arrow and .zst need a library, pyarrow, which the [nemo] extra brings.
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

from superpod.data.readers import paths, tables
from superpod.errors import UserError

MAX_ROW = 1 << 26
"""Bytes that a line, an element or a field may have: a longer one is a mistake, and would fill the memory."""
_CHUNK = 1 << 20
_BLANK = " \t\r\n"
FORMATS = {
    ".jsonl": "lines", ".ndjson": "lines", ".json": "lines", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet",
    ".arrow": "arrow",
}  # fmt: skip
"""Ending -> format. A file of lines that begins with [ is an array; a file of another ending is one of lines."""
PACKED = (".gz", ".zst", ".bz2", ".xz")
_BEGINNINGS = (
    (b"\x1f\x8b", "is gzip by its content", "name it .gz"),
    (b"\x28\xb5\x2f\xfd", "is Zstandard by its content", "name it .zst"),
    (b"PAR1", "is Parquet by its content", "name it .parquet"),
    (b"ARROW1", "is Arrow by its content", "name it .arrow"),
    (b"PK\x03\x04", "is a zip file", "unpack it first"),
    (b"\xff\xfe", "is UTF-16, not UTF-8", "iconv -f utf-16 -t utf-8 FILE"),
    (b"\xfe\xff", "is UTF-16, not UTF-8", "iconv -f utf-16 -t utf-8 FILE"),
)
LFS = b"version https://git-lfs.github.com/spec/"
"""How a file begins that `git clone` left as a pointer."""


@dataclass(frozen=True)
class Row:
    """One row: its number from 1, and its value, or why it has none. `text` is what stands in the file."""

    number: int
    value: object
    text: str
    problem: str = ""


def format_of(path: Path) -> str:
    """Which of the `FORMATS` a file has by its name."""
    name = path.name.lower()
    for ending in PACKED:
        name = name.removesuffix(ending)
    return FORMATS.get(os.path.splitext(name)[1], "lines")


def read(path: Path, columns: Collection[str] = ()) -> Iterator[Row]:
    """Every row of a file, in order. A table gives its `columns` only (none: all), without empty fields.

    Raises:
        UserError: the file cannot be read to its end, changes meanwhile, or is not what its ending says.
    """
    kind = format_of(path)
    with _unchanged(path):
        if kind in ("parquet", "arrow"):
            if _beginning(path).startswith(LFS):
                raise _pointer(path)
            yield from _numbered(tables.read(path, kind, columns))
            return
        with _readable(path), _opened(path) as stream:
            yield from (_csv(path, stream, columns) if kind == "csv" else _json(path, stream))


def _numbered(values: Iterator[dict[str, object]]) -> Iterator[Row]:
    for number, value in enumerate(values, 1):
        yield Row(number, value, json.dumps(value, default=str, ensure_ascii=False))


def check_file(path: Path) -> None:
    """UserError unless `path` is a plain file, or a link to one."""
    paths.check(path)
    try:
        kind = os.stat(path).st_mode
    except OSError as error:
        why = "is not a file" if not os.path.islink(path) else f"is a link that leads to no file ({error.strerror})"
        raise UserError(f"{paths.short(path)} {why}", "name a file of samples, such as a .jsonl") from None
    if not stat.S_ISREG(kind):
        what = "is a folder" if stat.S_ISDIR(kind) else "is a pipe or a device, which can be read only once"
        raise UserError(f"{paths.short(path)} is not a file: it {what}", "save the samples as a file first")


@contextmanager
def _unchanged(path: Path) -> Iterator[None]:
    """UserError when the file is another after it was read: its samples would be of two versions."""
    check_file(path)
    before = os.stat(path)
    yield
    try:
        after = os.stat(path)
    except FileNotFoundError:
        after = None
    if not after or (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise UserError(f"{paths.short(path)} changed while it was read", "run the command once it is complete")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what goes wrong below the rows into a UserError."""
    import lzma
    import zlib

    try:
        yield
    except EOFError:
        raise UserError(f"{paths.short(path)} is cut off: its compressed data ends too early", _COPY) from None
    except (OSError, zlib.error, lzma.LZMAError) as error:  # gzip.BadGzipFile is an OSError
        reason = getattr(error, "strerror", None) or paths.short(str(error))
        raise UserError(f"{paths.short(path)} cannot be read: {reason}", _COPY) from None


def _opened(path: Path) -> BinaryIO:
    import bz2
    import gzip
    import lzma

    ending = path.suffix.lower()
    if ending == ".gz":
        return cast("BinaryIO", gzip.open(path))
    if ending == ".bz2":
        return cast("BinaryIO", bz2.open(path))
    if ending == ".xz":
        return cast("BinaryIO", lzma.open(path))
    if ending == ".zst":
        return tables.decompressed(path)
    _refuse_beginning(path)
    return open(path, "rb")


def _beginning(path: Path) -> bytes:
    with _readable(path), open(path, "rb") as stream:
        return stream.read(64)


def _refuse_beginning(path: Path) -> None:
    begins = _beginning(path)
    if begins.startswith(LFS):
        raise _pointer(path)
    for magic, what, hint in _BEGINNINGS:
        if begins.startswith(magic):
            raise UserError(f"{paths.short(path)} {what}", hint)


def _pointer(path: Path) -> UserError:
    return UserError(f"{paths.short(path)} is a pointer of Git LFS, not the data", "git lfs pull, or hf download")


def _json(path: Path, stream: BinaryIO) -> Iterator[Row]:
    """Lines, or the elements of an array where the first character is a [."""
    begins = b""
    while not begins and (block := stream.read(_CHUNK)):
        begins = block.removeprefix(codecs.BOM_UTF8).lstrip()
    stream.seek(0)
    return _elements(path, stream) if begins.startswith(b"[") else _lines(stream)


def _lines(stream: BinaryIO) -> Iterator[Row]:
    number = 0
    while line := stream.readline(MAX_ROW + 1):
        number += 1
        if len(line) > MAX_ROW:
            while (rest := stream.readline(_CHUNK)) and not rest.endswith(b"\n"):
                pass
            text = line[:1000].decode("utf-8", "backslashreplace")
            yield Row(number, None, f"{text}...", f"longer than {MAX_ROW >> 20} MiB")
        elif line.strip():
            yield _line(number, line)


def _line(number: int, line: bytes) -> Row:
    if number == 1:  # editors on Windows begin a file with a byte-order mark
        line = line.removeprefix(codecs.BOM_UTF8)
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        shown = line.decode("utf-8", "backslashreplace").rstrip("\r\n")
        return Row(number, None, shown, f"not UTF-8 at byte {error.start}")
    text = text.strip()
    try:
        return Row(number, _parse(text), text)
    except (ValueError, RecursionError) as error:
        why = "it holds NUL bytes, as files have after a crash" if "\0" in text else str(error)
        end = "" if line.endswith(b"\n") else " (the file ends here without a line's end: is it cut off?)"
        return Row(number, None, text, why if isinstance(error, _Twice) else f"not JSON: {why}{end}")


class _Twice(ValueError):
    """An object has a key twice; JSON libraries silently take the last."""


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    whole = dict(pairs)
    if len(whole) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _Twice(f"has the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return whole


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _parse(text: str) -> object:
    return _DECODER.decode(text)


def _elements(path: Path, stream: BinaryIO) -> Iterator[Row]:
    """The elements of a JSON array, one after the other."""
    array = _Array(path, stream)
    array.skip("[")
    number = 0
    while not array.ends():
        number += 1
        value, text, problem = array.element(number)
        yield Row(number, value, text, problem)


class _Array:
    """A JSON array that is decoded element by element from a buffer of what was read."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path, self._stream = path, stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._buffer, self._at, self._complete = "", 0, False
        self._first = True

    def skip(self, mark: str) -> None:
        self._blank()
        if not self._buffer.startswith(mark, self._at):
            raise self._broken(f"{mark!r} expected")
        self._at += 1

    def ends(self) -> bool:
        """Whether the array ends here; otherwise the comma before the next element is behind."""
        self._blank()
        if self._buffer.startswith("]", self._at):
            self._at += 1
            self._blank()
            if self._at < len(self._buffer):
                raise self._broken("something follows the array")
            return True
        if not self._first:
            self.skip(",")
            self._blank()
        self._first = False
        return False

    def element(self, number: int) -> tuple[object, str, str]:
        """The value of the next element, its text, and what is wrong with it although it is JSON."""
        while True:
            try:
                value, end = _PLAIN.raw_decode(self._buffer, self._at)
                if end == len(self._buffer) and self._more():  # a number may go on
                    continue
            except (ValueError, RecursionError) as error:
                if not isinstance(error, RecursionError) and len(self._buffer) < MAX_ROW and self._more():
                    continue
                raise self._broken(f"element {number} is not JSON: {error}") from None
            text, self._at = self._buffer[self._at : end], end
            try:
                return _parse(text), text, ""
            except _Twice as error:
                return value, text, str(error)

    def _blank(self) -> None:
        while True:
            while self._at < len(self._buffer) and self._buffer[self._at] in _BLANK:
                self._at += 1
            if self._at < len(self._buffer) or not self._more():
                return

    def _more(self) -> bool:
        """Read on, twice as much as is waiting; False at the end of the file."""
        if self._complete:
            return False
        waiting = self._buffer[self._at :]
        block = self._stream.read(max(_CHUNK, len(waiting)))
        self._complete = not block
        try:
            self._buffer, self._at = waiting + self._decoder.decode(block, self._complete), 0
        except UnicodeDecodeError:
            raise self._broken("it is not UTF-8") from None
        return not self._complete

    def _broken(self, why: str) -> UserError:
        end = "; it ends within the array: is it cut off?" if self._complete and self._at >= len(self._buffer) else ""
        return UserError(f"{paths.short(self._path)}: {why}{end}", "a .jsonl file, a sample a line, can skip bad lines")


_PLAIN = json.JSONDecoder()


def _csv(path: Path, stream: BinaryIO, columns: Collection[str]) -> Iterator[Row]:
    """The rows of a CSV file as objects of its first line's names; the number is that of the row's last line."""
    csv.field_size_limit(MAX_ROW)
    name = path.name.lower()
    reader = None
    try:
        with io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
            reader = csv.reader(text, delimiter="\t" if ".tsv" in name else ",", strict=True)
            header = next(reader, [])
            if len(set(header)) != len(header):
                raise UserError(f"{paths.short(path)} names a column twice: {', '.join(header)}", "rename one")
            tables.refuse_other_columns(path, header, columns)
            for fields in filter(None, reader):
                pairs = zip(header, fields, strict=False)
                value = {key: tables.value(key, field) for key, field in pairs if field}
                many = f"{len(fields)} fields for {len(header)} columns" if len(fields) != len(header) else ""
                yield Row(reader.line_num, value, ",".join(fields), many)
    except csv.Error as error:
        where = f"{paths.short(path)}:{reader.line_num if reader else 1}"
        raise UserError(f"{where}: not CSV: {error}", 'quote fields with ""') from None
    except UnicodeDecodeError:
        line = reader.line_num if reader else 0
        raise UserError(f"{paths.short(path)}: not UTF-8 after line {line}", "convert it") from None


_COPY = "copy it anew"
