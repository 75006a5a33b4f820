"""Weights of a model: from a Hugging Face folder and back, an adapter merged, a checkpoint made to speak."""
