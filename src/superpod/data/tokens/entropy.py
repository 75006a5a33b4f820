"""Entropy of the token frequencies: the lowest loss of a model that ignores context."""

from typing import TYPE_CHECKING

from superpod.data.folder import SPLITS, DataFolder, split_ranges
from superpod.data.tokens import indexed
from superpod.errors import UserError

if TYPE_CHECKING:
    import numpy as np


def unigram_entropy(folder: DataFolder, split: str = "validation") -> float:
    """Return the entropy of the token frequencies in a split, -sum(p ln p), in nats per token.

    No model that ignores context can have a lower loss on that split, so a lower validation loss shows that the model
    uses context. The documents are those of Megatron's split. The frequencies of several prefixes are averaged with the
    weights of the blend, or else by number of tokens.

    Raises:
        UserError: `split` is not train, validation or test, or has no tokens.
    """
    import numpy as np

    if split not in SPLITS:
        raise UserError(f"unknown split {split!r}", f"choose one of {', '.join(SPLITS)}")
    counts = [_count_tokens(folder, number, split) for number in range(len(folder.prefixes))]
    weights = folder.weights if folder.weights and len(counts) > 1 else [float(count.sum()) for count in counts]
    mixed_counts = np.zeros(max(count.size for count in counts))  # [vocabulary], not yet normalised
    for count, weight in zip(counts, weights, strict=True):
        if count.sum():
            mixed_counts[: count.size] += count / count.sum() * weight
    shares = mixed_counts[mixed_counts > 0] / mixed_counts.sum() if mixed_counts.any() else mixed_counts[:0]
    if not shares.size:
        hint = "increase its share, or add documents"
        raise UserError(f"{split} has no tokens in {folder.path} with split {folder.split}", hint)
    return float(-(shares * np.log(shares)).sum())


def _count_tokens(folder: DataFolder, number: int, split: str) -> "np.ndarray":
    """Return the number of occurrences of each token id in a split of prefix `number`, as int64[vocab]."""
    import numpy as np

    prefix = folder.prefix_paths[number]
    lengths = np.frombuffer(indexed.read_lengths(prefix), dtype=np.int32).astype(np.int64)
    begin, end = split_ranges(folder.split, lengths.size)[SPLITS.index(split)]
    first, last = int(lengths[:begin].sum()), int(lengths[:end].sum())
    tokens = np.memmap(indexed.bin_path(prefix), dtype=indexed.read_header(prefix)[0], mode="r")
    total = np.zeros(0, dtype=np.int64)
    # In blocks of 16 million tokens, because np.bincount makes an int64 copy of its input.
    for at in range(first, last, 1 << 24):
        part = np.bincount(tokens[at : min(at + (1 << 24), last)], minlength=folder.vocab)
        total = part if not total.size else np.pad(total, (0, max(0, part.size - total.size))) + part
    return total
