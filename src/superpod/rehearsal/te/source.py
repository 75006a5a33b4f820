"""Where Transformer Engine's Python lies: beside the environment's packages, so that nothing imports it by accident."""

from __future__ import annotations

import sys
from pathlib import Path

from superpod.errors import UserError

VERSION = "2.9.0"
"""Of Transformer Engine; `scripts/install.sh` installs this one."""


def folder() -> Path:
    """The folder that holds the package `transformer_engine`, without its compiled part.

    Raises:
        UserError: it is not installed.
    """
    place = Path(sys.prefix, "share", "superpod", f"te-{VERSION}")
    if not (place / "transformer_engine" / "pytorch" / "__init__.py").is_file():
        raise UserError(
            f"Transformer Engine {VERSION}'s Python is not in {place}: models cannot be built with its layers",
            "make quickstart, or: sh scripts/install.sh python3 .venv",
        )
    return place
