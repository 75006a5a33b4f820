"""Check whether NeMo is installed without importing it. A login node may have only the base installation."""

from __future__ import annotations

import importlib.util

from superpod.errors import UserError

REQUIRED_PACKAGES = ("torch", "nemo", "megatron", "nemo_run", "fiddle", "lightning")
"""Packages required to build a configuration (extra `nemo` in pyproject.toml)."""
INSTALL = "pip install -c constraints.txt -e '.[nemo]'; `recipes doctor` lists what is installed"


def missing_package() -> str:
    """Return the first of `REQUIRED_PACKAGES` that is not installed, or ""."""
    return next((name for name in REQUIRED_PACKAGES if importlib.util.find_spec(name) is None), "")


def require(action: str) -> None:
    """Raise UserError if a package of NeMo is not installed. `action` begins the message, such as "training"."""
    package = missing_package()
    if package:
        raise UserError(f"{action} needs NeMo, but {package} is not installed", INSTALL)
