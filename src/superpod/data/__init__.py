"""Training data: data folders of tokenized text, and readers of fine-tuning samples."""

from superpod.data.folder import DataFolder
from superpod.data.tokens.entropy import unigram_entropy

__all__ = ["DataFolder", "unigram_entropy"]
