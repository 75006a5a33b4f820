"""What a rehearsal changes in torch, Megatron-Core and NeMo so that they run without a GPU: a file per part.

Importing this package patches nothing; `registry.install` does. `docs/rehearsal.md` lists every patch with its reason.
"""
