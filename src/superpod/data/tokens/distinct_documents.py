"""Find the distinct documents of all shards, and write them in random order to one prefix."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.data.samples import duplicate_samples
from superpod.data.tokens import indexed

if TYPE_CHECKING:
    import numpy as np

_BLOCK = 1 << 14
"""Documents that are converted to Python numbers at a time."""


@dataclass(frozen=True)
class MergedDocuments:
    """The distinct documents of all shards.

    For each document, `shard` is the index of its prefix, and `begins` and `ends` are its byte range in .bin.
    """

    prefixes: list[str]
    shard: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    tokens: int
    duplicates: int

    @property
    def documents(self) -> int:
        """Number of distinct documents."""
        return int(self.shard.size)


def find_distinct(prefixes: list[str], vocab: int) -> MergedDocuments:
    """Return the positions of all documents in the shards, except those with the same tokens as an earlier document.

    Megatron splits by document, so copies of a document could be in both training and validation. Uses 40 bytes of
    memory per document.

    Args:
        prefixes: prefixes of the shards' token files.
        vocab: vocabulary size, which determines the token dtype.
    """
    import numpy as np

    lengths = [np.frombuffer(indexed.read_lengths(prefix), dtype=np.int32) for prefix in prefixes]
    size = np.dtype(indexed.dtype_for(vocab)).itemsize
    begins = np.concatenate([np.cumsum(part, dtype=np.int64) - part for part in lengths]) * size
    ends = begins + np.concatenate(lengths).astype(np.int64) * size
    shard = np.repeat(np.arange(len(prefixes), dtype=np.int32), [part.size for part in lengths])
    digests = np.empty(begins.size, dtype=np.uint64)
    with ExitStack() as stack:
        views = [_map_bin_file(stack, prefix) for prefix in prefixes]
        for at, (number, begin, end) in enumerate(_iterate_in_blocks(shard, begins, ends)):
            digests[at] = duplicate_samples.digest(views[number][begin:end])
    first = np.sort(np.unique(digests, return_index=True)[1])
    tokens = int((ends[first] - begins[first]).sum()) // size
    return MergedDocuments(prefixes, shard[first], begins[first], ends[first], tokens, begins.size - first.size)


def _iterate_in_blocks(*values: np.ndarray) -> Iterator[tuple[int, ...]]:
    """Yield a tuple of the arrays' values for each document. Converting blocks to Python numbers is faster."""
    for at in range(0, values[0].size, _BLOCK):
        yield from zip(*(value[at : at + _BLOCK].tolist() for value in values), strict=True)


def write_shuffled(
    merged: MergedDocuments, out: Path, vocab: int, seed: int, progress: Callable[[int, int], None]
) -> str:
    """Write the documents in random order to the prefix `out`, and return the hex sha256 of .bin and .idx.

    Megatron splits by document order, so without shuffling, only documents of the last files would be used for
    validation. The order depends on the seed and the number of documents, but not on shards or workers.
    """
    import numpy as np

    order = np.random.RandomState(seed).permutation(merged.documents)  # numpy guarantees the stream of RandomState
    with ExitStack() as stack, indexed.Writer(out, vocab) as writer:
        views = [_map_bin_file(stack, prefix) for prefix in merged.prefixes]
        for at in range(0, order.size, _BLOCK):
            block = order[at : at + _BLOCK]
            for number, begin, end in _iterate_in_blocks(merged.shard[block], merged.begins[block], merged.ends[block]):
                writer.add_bytes(views[number][begin:end])
            progress(at + block.size, order.size)
    return writer.sha256


def _map_bin_file(stack: ExitStack, prefix: str) -> mmap.mmap:
    """Map a prefix's .bin file into memory until the stack is closed."""
    with open(indexed.bin_path(prefix), "rb") as stream:
        return stack.enter_context(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
