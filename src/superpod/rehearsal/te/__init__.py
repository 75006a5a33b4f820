"""Transformer Engine's own Python on a CPU: NeMo's models with TE's layers, for a GPU generation that is not here."""
