"""Whether NeMo can be imported here: a login node may have the base install alone. Nothing heavy is imported."""

from __future__ import annotations

import importlib.util

from superpod.errors import UserError

NEEDED = ("torch", "nemo", "megatron", "nemo_run", "fiddle", "lightning")
"""Packages without which no configuration is built (extra `nemo` of pyproject.toml)."""
INSTALL = "pip install -c constraints.txt -e '.[nemo]'; `recipes doctor` shows what is there"


def missing() -> str:
    """The first package of NeMo's stack that is not installed; "" = all are there."""
    return next((name for name in NEEDED if importlib.util.find_spec(name) is None), "")


def require(what: str) -> None:
    """Refuse `what`, such as "training", where NeMo is not installed.

    Raises:
        UserError: with the package that is missing, and how to install it.
    """
    if name := missing():
        raise UserError(f"{what} needs NeMo, and {name} is not installed", INSTALL)
