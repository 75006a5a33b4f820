"""Rows of Parquet and Arrow files, and Zstandard: what needs pyarrow, which the [nemo] extra brings."""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO, cast

from superpod.data.readers import paths
from superpod.data.tokens.tokenizer import library
from superpod.errors import UserError

if TYPE_CHECKING:
    import pyarrow

_ROWS = 256
"""Rows that become Python objects at a time."""


def read(path: Path, kind: str, columns: Collection[str]) -> Iterator[dict[str, object]]:
    """The rows of a "parquet" or "arrow" file as JSON values, without nulls; of all `columns` (none: all) it has.

    Raises:
        UserError: not such a file, cut off, or without any of `columns`.
    """
    arrow = library("pyarrow")
    with _explained(path, kind, arrow):
        batches = _parquet(path, columns) if kind == "parquet" else _arrow(path, arrow, columns)
        for batch in batches:
            for at in range(0, batch.num_rows, _ROWS):
                for row in batch.slice(at, _ROWS).to_pylist():
                    yield {key: value(key, _without_nulls(field)) for key, field in row.items() if field is not None}


def _parquet(path: Path, columns: Collection[str]) -> Iterator[pyarrow.RecordBatch]:
    file = library("pyarrow.parquet").ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
    names = refuse_other_columns(path, file.schema_arrow.names, columns)
    return file.iter_batches(_ROWS, columns=names)


def _arrow(path: Path, arrow: ModuleType, columns: Collection[str]) -> Iterator[pyarrow.RecordBatch]:
    """Record batches of an IPC stream, as `datasets` writes it, or of an IPC file."""
    ipc = library("pyarrow.ipc")
    with arrow.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            reader = ipc.open_file(source)
            batches = (reader.get_batch(at) for at in range(reader.num_record_batches))
        else:
            source.seek(0)
            reader = batches = ipc.open_stream(source)
        names = refuse_other_columns(path, reader.schema.names, columns)
        for batch in batches:
            yield batch.select(names)


def refuse_other_columns(path: Path, names: Collection[str], columns: Collection[str]) -> list[str]:
    """Those `names` that are among `columns` (none: all); UserError when none is."""
    known = [name for name in names if not columns or name in columns]
    if not known:
        have = ", ".join(map(repr, list(names)[:12])) or "none"
        raise UserError(f"{paths.short(path)} has the columns {have}", "--key NAME=COLUMN names another")
    return known


def _without_nulls(value: object) -> object:
    """Objects in a column all have the same keys: a null is one that the object does not have."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    return value


def value(key: str, field: object) -> object:
    """The field; a list or an object kept as its JSON text becomes one."""
    if isinstance(field, str) and key in ("messages", "conversations", "tools") and field[:1] in "[{":
        try:
            return json.loads(field)
        except (ValueError, RecursionError):
            return field
    return field


@contextmanager
def _explained(path: Path, kind: str, arrow: ModuleType) -> Iterator[None]:
    try:
        yield
    except (arrow.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = paths.short((str(error).strip() or type(error).__name__).splitlines()[0])
        raise UserError(f"{paths.short(path)} cannot be read as {kind}: {reason}", "copy or write it anew") from None


def decompressed(path: Path) -> BinaryIO:
    """The bytes of a .zst file, from its beginning."""
    return cast("BinaryIO", io.BufferedReader(_Stream(path, library("pyarrow")), 1 << 20))


class _Stream(io.RawIOBase):
    """pyarrow's stream as Python's own buffers take it; it goes back to the beginning only."""

    def __init__(self, path: Path, arrow: ModuleType) -> None:
        self._open = lambda: arrow.input_stream(str(path), compression="zstd")
        self._stream = self._open()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._stream.close()
        self._stream = self._open()
        return 0

    def tell(self) -> int:
        return self._stream.tell()

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        block = self._stream.read(len(buffer))
        buffer[: len(block)] = block
        return len(block)

    def close(self) -> None:
        self._stream.close()
        super().close()
