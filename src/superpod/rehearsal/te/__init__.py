"""Builds NeMo's models with Transformer Engine's layers on a CPU, for any GPU generation."""
