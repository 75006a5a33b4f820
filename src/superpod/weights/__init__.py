"""Converts weights from and to Hugging Face format, merges adapters, evaluates checkpoints, prepares fine-tuning."""
