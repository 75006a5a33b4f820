"""The data folder: text made into Megatron's token files, or existing token files registered, for every recipe."""

from superpod.recipes.data.entropy import unigram_entropy
from superpod.recipes.data.folder import DataFolder

__all__ = ["DataFolder", "unigram_entropy"]
