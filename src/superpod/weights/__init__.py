"""A model's weights: convert from and to Hugging Face, merge adapters, generate text from a checkpoint."""
