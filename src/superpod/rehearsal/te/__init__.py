"""Transformer Engine's Python on a CPU: builds NeMo's models with TE's layers for any GPU generation."""
