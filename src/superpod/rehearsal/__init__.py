"""Runs NeMo without a GPU. This is the only package that patches torch, Megatron-Core and NeMo for CPUs.

``install`` applies the patches, ``dry_build`` builds the model of any rank on the meta device, and ``rehearse`` makes a
recipe run its own training loop with gloo. Importing this package applies no patch and imports neither torch
nor NeMo. docs/rehearsal.md explains what a rehearsal shows and what it cannot show.
"""

from superpod.rehearsal.errors import RehearsalError
from superpod.rehearsal.patches.registry import install
from superpod.rehearsal.proof.meta_build import dry_build
from superpod.rehearsal.training.cpu_recipe import Change, rehearse

__all__ = ["Change", "RehearsalError", "dry_build", "install", "rehearse"]
