"""The data folder that every recipe trains on: token files built from text, or existing ones registered."""

from superpod.recipes.data.entropy import unigram_entropy
from superpod.recipes.data.folder import DataFolder

__all__ = ["DataFolder", "unigram_entropy"]
