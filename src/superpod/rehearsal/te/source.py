"""Locates Transformer Engine's Python package, which is installed outside of site-packages to avoid accidental use."""

from __future__ import annotations

import sys
from pathlib import Path

from superpod.errors import UserError

VERSION = "2.9.0"
"""Version of Transformer Engine that `scripts/install.sh` installs."""


def find_folder() -> Path:
    """Return the folder that contains the package `transformer_engine` without its compiled part.

    Raises:
        UserError: the package is not installed.
    """
    path = Path(sys.prefix, "share", "superpod", f"te-{VERSION}")
    if not (path / "transformer_engine" / "pytorch" / "__init__.py").is_file():
        raise UserError(
            f"Transformer Engine {VERSION} is not installed in {path}: models cannot be built with its layers",
            "run `make quickstart` or `sh scripts/install.sh python3 .venv`",
        )
    return path


def is_installed() -> bool:
    """Return whether Transformer Engine's Python package is installed."""
    try:
        find_folder()
    except UserError:
        return False
    return True
