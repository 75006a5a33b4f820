"""Transformer Engine's Python package on a CPU: builds NeMo's models with TE's layers for any GPU generation."""
