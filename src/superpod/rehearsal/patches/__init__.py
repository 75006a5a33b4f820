"""Patches of torch, Megatron-Core and NeMo that let them run without a GPU, one file per subject.

Importing this package applies no patch; `registry.install` does. `docs/rehearsal.md` lists every patch with its reason.
"""
