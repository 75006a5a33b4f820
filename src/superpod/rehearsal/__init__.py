"""Real NeMo without a GPU: the one place that patches torch, Megatron-Core and NeMo for the CPU.

``install`` applies the patches, ``dry_build`` builds any rank's real model without memory, ``rehearse``
turns a recipe into a run of its own training loop over gloo. Importing this package patches nothing and
imports neither torch nor NeMo; see docs/rehearsal.md for what a rehearsal proves and what it can't.
"""

from superpod.rehearsal.errors import RehearsalError
from superpod.rehearsal.patches.registry import install
from superpod.rehearsal.proof.meta_build import dry_build
from superpod.rehearsal.training.cpu_recipe import Change, rehearse

__all__ = ["Change", "RehearsalError", "dry_build", "install", "rehearse"]
