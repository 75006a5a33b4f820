"""Read, write and check Megatron's token files with only the standard library.

A prefix names two files. `.bin` contains the token ids of all documents. `.idx`, in little-endian order, has their
lengths and positions (`_IndexWriter` and `_IndexReader` in megatron/core/datasets/indexed_dataset.py of megatron-core
0.15.3):

    9 bytes   b"MMIDIDX\\x00\\x00"
    uint64    version, 1
    uint8     dtype code
    uint64    S, the number of sequences
    uint64    D, the number of documents + 1
    int32[S]  tokens of each sequence
    int64[S]  byte in .bin at which each sequence begins
    int64[D]  sequence at which each document begins; the last one is S
"""

import hashlib
import os
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from operator import add, eq, le
from pathlib import Path
from types import TracebackType
from typing import IO

from superpod.data import paths
from superpod.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
"""Megatron's dtype codes; token ids have an integer type."""
TYPECODES = {"uint8": "B", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint16": "H"}
UINT16_VOCAB = 65500
"""Megatron's `DType.optimal_dtype` selects uint16 for smaller vocabularies, else int32."""
_BLOCK = 1 << 16


def dtype_for(vocab: int) -> str:
    """Return Megatron's dtype of token ids for a vocabulary of size `vocab`: "uint16" or "int32"."""
    return "uint16" if vocab < UINT16_VOCAB else "int32"


def bin_path(prefix: str | Path) -> Path:
    """Return the path of a prefix's token file. The prefix may contain dots."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return the path of a prefix's index file."""
    return Path(f"{prefix}.idx")


class Writer:
    """Context manager that writes the same bytes as Megatron's IndexedDatasetBuilder with one sequence per document.

    `.idx` is written on exit unless an exception was raised, so an incomplete `.bin` is never read. `sha256`, the hex
    digest of .bin followed by .idx, is set on exit. Both files are flushed to the disk.
    """

    def __init__(self, prefix: str | Path, vocab: int) -> None:
        self.prefix = prefix
        self.dtype = dtype_for(vocab)
        self.sha256 = ""
        self._typecode = TYPECODES[self.dtype]
        self._itemsize = array(self._typecode).itemsize
        self._lengths = array("i")  # 4 bytes per document instead of 36 in a list
        self._digest = hashlib.sha256()

    def __enter__(self) -> "Writer":
        self._bin = open(bin_path(self.prefix), "wb")
        return self

    def add(self, tokens: Iterable[int]) -> None:
        """Append a document of token ids. Raises OverflowError if an id does not fit the dtype."""
        self.add_bytes(_swap_if_big_endian(array(self._typecode, tokens)).tobytes())

    def add_bytes(self, raw: bytes | memoryview) -> None:
        """Append a document, given as the bytes of its token ids in this writer's dtype."""
        self._bin.write(raw)
        self._digest.update(raw)
        self._lengths.append(len(raw) // self._itemsize)

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        with self._bin as stream:
            if kind is None:
                _flush_to_disk(stream)
        if kind is None:
            with open(idx_path(self.prefix), "wb") as stream:
                for part in self._index():
                    stream.write(part)
                    self._digest.update(part)
                _flush_to_disk(stream)
            self.sha256 = self._digest.hexdigest()

    def _index(self) -> Iterator[bytes]:
        count = len(self._lengths)
        code = next(code for code, name in DTYPES.items() if name == self.dtype)
        yield HEADER.pack(MAGIC, 1, code, count, count + 1)
        yield _swap_if_big_endian(self._lengths).tobytes()
        yield from _pack_int64(islice(accumulate(self._lengths, initial=0), count), scale=self._itemsize)
        yield from _pack_int64(range(count + 1))


def _pack_int64(values: Iterable[int], scale: int = 1) -> Iterator[bytes]:
    stream = iter(values)
    while True:
        block = array("q", (value * scale for value in islice(stream, _BLOCK)))
        if not block:
            return
        yield _swap_if_big_endian(block).tobytes()


def _swap_if_big_endian(values: array) -> array:
    """Return an array with its bytes swapped on a big-endian machine, because the files are little-endian."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values


def _flush_to_disk(stream: IO[bytes]) -> None:
    stream.flush()
    # A marker written later must not reach the disk before the data that it declares complete.
    os.fsync(stream.fileno())


@dataclass(frozen=True)
class IndexSummary:
    """Counts of documents, sequences (the unit of Megatron's split) and tokens of a prefix, and its token dtype."""

    documents: int
    sequences: int
    tokens: int
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes per token."""
        return array(TYPECODES[self.dtype]).itemsize


def read_header(prefix: str | Path) -> tuple[str, int, int]:
    """Return (dtype, sequences, documents + 1) from the header of .idx. Raises UserError if a file is invalid."""
    for path in (bin_path(prefix), idx_path(prefix)):
        paths.check(path, hint=_PREFIX_HINT)
        if not path.is_file():
            raise UserError(f"{path} is missing: a prefix needs both {path.stem}.bin and {path.stem}.idx", _PREFIX_HINT)
        if not os.access(path, os.R_OK):
            raise UserError(f"no permission to read {path}", "ask its owner for chmod a+r")
    path = idx_path(prefix)
    with open(path, "rb") as stream:
        raw = stream.read(HEADER.size)
    if raw[: len(MAGIC)] != MAGIC:
        raise UserError(f"{path} is not a Megatron index: it begins with {raw[:9]!r}, not {MAGIC!r}", _PREFIX_HINT)
    if len(raw) < HEADER.size:
        raise UserError(f"{path} is truncated: {len(raw)} bytes, but its header has {HEADER.size}", _REBUILD)
    _, version, code, sequences, documents = HEADER.unpack(raw)
    if version != 1:
        raise UserError(f"{path} has index version {version}, but Megatron reads only version 1", _REBUILD)
    if DTYPES.get(code) not in TYPECODES:
        raise UserError(f"{path} has dtype code {code} ({DTYPES.get(code, 'unknown')}), not an integer type", _REBUILD)
    return DTYPES[code], sequences, documents


def verify(prefix: str | Path) -> IndexSummary:
    """Check that the two files of a prefix are consistent, and return their counts and dtype.

    Reads all of `.idx` (20 bytes per document), but only the size of `.bin`.

    Raises:
        UserError: a file is missing, truncated or too long, `.idx` is not an index or does not match `.bin`, or there
            are no documents.
    """
    dtype, sequences, boundaries = read_header(prefix)
    path = idx_path(prefix)
    size = path.stat().st_size
    expected = HEADER.size + 12 * sequences + 8 * boundaries  # int32 + int64 per sequence, int64 per document
    if size != expected:
        problem = "truncated" if size < expected else "too long"
        raise UserError(f"{path} is {problem}: {sequences} sequences need {expected} bytes, not {size}", _REBUILD)
    if sequences == 0 or boundaries < 2:
        raise UserError(f"{path} has no documents", "remove this prefix, or build it from text again")
    lengths, pointers, starts = _read_index(path, sequences, boundaries)
    # map and le instead of a loop, because an index may have 10^8 documents.
    if starts[0] != 0 or starts[-1] != sequences or not all(map(le, starts, starts[1:])):
        raise UserError(f"{path}: the document boundaries must increase from 0 to {sequences}", _REBUILD)
    summary = IndexSummary(boundaries - 1, sequences, sum(lengths), dtype)
    _check_bin_size(prefix, summary, lengths, pointers)
    return summary


def read_lengths(prefix: str | Path) -> array:
    """Return the tokens per sequence, as array("i") in file order. Raises UserError like `read_header`."""
    _, sequences, boundaries = read_header(prefix)
    return _read_index(idx_path(prefix), sequences, boundaries)[0]


def _read_index(path: Path, sequences: int, boundaries: int) -> tuple[array, array, array]:
    """Return the lengths (tokens), pointers (bytes) and document boundaries (sequences) in an .idx file."""
    arrays = array("i"), array("q"), array("q")
    with open(path, "rb") as stream:
        stream.seek(HEADER.size)
        for values, count in zip(arrays, (sequences, sequences, boundaries), strict=True):
            values.fromfile(stream, count)
    lengths, pointers, starts = map(_swap_if_big_endian, arrays)
    return lengths, pointers, starts


def _check_bin_size(prefix: str | Path, summary: IndexSummary, lengths: array, pointers: array) -> None:
    """Raise UserError unless the sequences fill `.bin` exactly."""
    # map and operator instead of a loop, which takes minutes for 10^8 documents.
    size = bin_path(prefix).stat().st_size
    if min(lengths) < 0 or min(pointers) < 0:
        raise UserError(f"{idx_path(prefix)} contains a negative length or pointer", _REBUILD)
    end = max(map(add, pointers, map(summary.itemsize.__mul__, lengths)))
    if end > size:
        raise UserError(f"{idx_path(prefix)} points to byte {end} of {bin_path(prefix)}, which has {size}", _REBUILD)
    if not all(map(eq, pointers, accumulate(map(summary.itemsize.__mul__, lengths), initial=0))):
        raise UserError(f"{idx_path(prefix)}: its sequences are not contiguous in .bin", _REBUILD)
    if summary.tokens * summary.itemsize != size:
        content = f"{summary.tokens} tokens of {summary.itemsize} bytes are {summary.tokens * summary.itemsize} bytes"
        raise UserError(f"{bin_path(prefix)} does not match its .idx: {content}, but the file has {size}", _REBUILD)


def digest(prefix: str | Path, progress: Callable[[int], None] = lambda _: None) -> str:
    """Return the hex sha256 of `.bin` followed by `.idx`; `progress` is called with the byte count of each block."""
    sha256 = hashlib.sha256()
    for path in (bin_path(prefix), idx_path(prefix)):
        with open(path, "rb") as stream:
            for block in iter(lambda: stream.read(1 << 22), b""):
                sha256.update(block)
                progress(len(block))
    return sha256.hexdigest()


_PREFIX_HINT = "pass the path of the two files without .bin or .idx"
_REBUILD = "copy both files again, or build them from text again"
