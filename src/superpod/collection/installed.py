"""Check whether NeMo is installed, without importing it: a login node may have only the base installation."""

from __future__ import annotations

import importlib.util

from superpod.errors import UserError

REQUIRED_PACKAGES = ("torch", "nemo", "megatron", "nemo_run", "fiddle", "lightning")
"""Packages required to build a configuration (extra `nemo` in pyproject.toml)."""
INSTALL = "pip install -c constraints.txt -e '.[nemo]'; `recipes doctor` lists what is installed"


def missing_package() -> str:
    """Return the first package of NeMo's stack that is not installed, or ""."""
    return next((name for name in REQUIRED_PACKAGES if importlib.util.find_spec(name) is None), "")


def require(action: str) -> None:
    """Check that NeMo is installed for an action, such as "training".

    Raises:
        UserError: a package is missing; the hint has the command to install it.
    """
    package = missing_package()
    if package:
        raise UserError(f"{action} needs NeMo, but {package} is not installed", INSTALL)
