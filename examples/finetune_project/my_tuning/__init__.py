"""A model fine-tuned on samples of our own."""
