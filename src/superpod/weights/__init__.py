"""Converts weights from and to Hugging Face, merges adapters, evaluates checkpoints, and prepares fine-tuning."""
