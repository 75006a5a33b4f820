"""The data folder that every recipe trains on: token files built from text, or existing ones registered."""

from superpod.data.folder import DataFolder
from superpod.data.tokens.entropy import unigram_entropy

__all__ = ["DataFolder", "unigram_entropy"]
