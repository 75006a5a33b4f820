"""Read Parquet, Arrow and Zstandard files with pyarrow, which the [nemo] extra installs."""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO, cast

from superpod.data import paths
from superpod.data.tokens.tokenizer import import_package
from superpod.errors import UserError

if TYPE_CHECKING:
    import pyarrow

_ROWS_PER_BATCH = 256
"""Rows that are converted to Python objects at a time."""


def read_table(path: Path, kind: str, columns: Collection[str]) -> Iterator[dict[str, object]]:
    """Yield the rows of a table as JSON objects without nulls.

    Args:
        path: the file.
        kind: its format, "parquet" or "arrow".
        columns: columns to read if they exist; empty for all.

    Raises:
        UserError: the file is invalid or truncated, or has none of `columns`.
    """
    arrow = import_package("pyarrow")
    with _translate_errors(path, kind, arrow):
        batches = _read_parquet(path, columns) if kind == "parquet" else _read_arrow(path, arrow, columns)
        for batch in batches:
            for at in range(0, batch.num_rows, _ROWS_PER_BATCH):
                for row in batch.slice(at, _ROWS_PER_BATCH).to_pylist():
                    fields = {key: field for key, field in row.items() if field is not None}
                    yield {key: parse_json_column(key, _remove_nulls(field)) for key, field in fields.items()}


def _read_parquet(path: Path, columns: Collection[str]) -> Iterator[pyarrow.RecordBatch]:
    file = import_package("pyarrow.parquet").ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
    names = select_columns(path, file.schema_arrow.names, columns)
    return file.iter_batches(_ROWS_PER_BATCH, columns=names)


def _read_arrow(path: Path, arrow: ModuleType, columns: Collection[str]) -> Iterator[pyarrow.RecordBatch]:
    """Yield the record batches of an IPC stream, which `datasets` writes, or of an IPC file."""
    ipc = import_package("pyarrow.ipc")
    with arrow.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            reader = ipc.open_file(source)
            batches = (reader.get_batch(at) for at in range(reader.num_record_batches))
        else:
            source.seek(0)
            reader = batches = ipc.open_stream(source)
        names = select_columns(path, reader.schema.names, columns)
        for batch in batches:
            yield batch.select(names)


def select_columns(path: Path, names: Collection[str], columns: Collection[str]) -> list[str]:
    """Return the names that are in `columns` (all if it is empty). Raises UserError if there are none."""
    selected_columns = [name for name in names if not columns or name in columns]
    if not selected_columns:
        available_names = ", ".join(map(repr, list(names)[:12])) or "none"
        raise UserError(
            f"{paths.shorten(path)} has only the columns {available_names}", "select one with --key NAME=COLUMN"
        )
    return selected_columns


def _remove_nulls(value: object) -> object:
    """Return a JSON value without keys that are null: tables store null for a key that an object does not have."""
    if isinstance(value, dict):
        return {key: _remove_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_remove_nulls(part) for part in value]
    return value


def parse_json_column(key: str, field: object) -> object:
    """Return the value of a messages or tools column that is stored as JSON text; return other fields unchanged."""
    if isinstance(field, str) and key in ("messages", "conversations", "tools") and field[:1] in "[{":
        try:
            return json.loads(field)
        except (ValueError, RecursionError):
            return field
    return field


@contextmanager
def _translate_errors(path: Path, kind: str, arrow: ModuleType) -> Iterator[None]:
    try:
        yield
    except (arrow.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = paths.shorten((str(error).strip() or type(error).__name__).splitlines()[0])
        raise UserError(
            f"{paths.shorten(path)} cannot be read as {kind}: {reason}", "copy it or create it again"
        ) from None


def open_zstd(path: Path) -> BinaryIO:
    """Open a .zst file as a stream of its decompressed bytes."""
    return cast("BinaryIO", io.BufferedReader(_ZstdStream(path, import_package("pyarrow")), 1 << 20))


class _ZstdStream(io.RawIOBase):
    """Adapts pyarrow's decompressed stream to Python's `io`; `seek` always goes to the beginning."""

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
