"""Entropy of the token frequencies: the loss of a model without context, below which training must get."""

from typing import TYPE_CHECKING

from superpod.data.folder import SPLITS, DataFolder, split_ranges
from superpod.data.tokens import indexed
from superpod.errors import UserError

if TYPE_CHECKING:
    import numpy as np


def unigram_entropy(folder: DataFolder, split: str = "validation") -> float:
    """Return the entropy of a part's token frequencies, -sum(p ln p), in nats per token.

    No model without context can have a lower loss on that part, so a lower validation loss shows that the model uses
    context. Megatron's split determines the documents of the part. A weighted blend mixes the frequencies of its
    prefixes by weight; other blends mix them by tokens.

    Raises:
        UserError: the part is unknown or empty.
    """
    import numpy as np

    if split not in SPLITS:
        raise UserError(f"there is no part {split!r}", f"choose one of {', '.join(SPLITS)}")
    counts = [_counts(folder, number, split) for number in range(len(folder.prefixes))]
    weights = folder.weights if folder.weights and len(counts) > 1 else [float(count.sum()) for count in counts]
    mixed_counts = np.zeros(max(count.size for count in counts))  # [vocabulary], not yet normalised
    for count, weight in zip(counts, weights, strict=True):
        if count.sum():
            mixed_counts[: count.size] += count / count.sum() * weight
    shares = mixed_counts[mixed_counts > 0] / mixed_counts.sum() if mixed_counts.any() else mixed_counts[:0]
    if not shares.size:
        hint = "use a split with a larger share for it, or more documents"
        raise UserError(f"the {split} part of split {folder.split} has no tokens in {folder.path}", hint)
    return float(-(shares * np.log(shares)).sum())


def _counts(folder: DataFolder, number: int, split: str) -> "np.ndarray":
    """Count the occurrences of each token id in one split of one prefix."""
    import numpy as np

    prefix = folder.prefix_paths[number]
    lengths = np.frombuffer(indexed.lengths(prefix), dtype=np.int32).astype(np.int64)
    begin, end = split_ranges(folder.split, lengths.size)[SPLITS.index(split)]
    first, last = int(lengths[:begin].sum()), int(lengths[:end].sum())
    tokens = np.memmap(indexed.bin_path(prefix), dtype=indexed.read_header(prefix)[0], mode="r")
    total = np.zeros(0, dtype=np.int64)
    # In blocks of 16 million tokens, because np.bincount makes an int64 copy of its input.
    for at in range(first, last, 1 << 24):
        part = np.bincount(tokens[at : min(at + (1 << 24), last)], minlength=folder.vocab)
        total = part if not total.size else np.pad(total, (0, max(0, part.size - total.size))) + part
    return total
