"""Use one Weights & Biases run for all attempts of a run, by setting its id. Standard library only.

The id is the name of the run folder. Lightning's WandbLogger passes `resume="allow"`, so that later attempts continue
the same curves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOGGER = "WandbLogger"
"""Lightning's class in the configuration of a recipe."""


def set_run_id(log: Any, run: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Set the W&B id of the loggers in `log` (`partial.log`) to the name of the run; return whether one was set.

    An id or version in the recipe takes precedence, as does WANDB_RUN_ID, which wandb itself reads.
    """
    if environ.get("WANDB_RUN_ID"):
        return False
    is_set = False
    for logger in (_get_field(log, "wandb"), *(_get_field(log, "extra_loggers") or [])):
        config_class = getattr(logger, "__fn_or_cls__", None)  # the class of a Fiddle configuration
        if getattr(config_class, "__name__", "") != LOGGER:
            continue
        if not (_get_field(logger, "id") or _get_field(logger, "version")):
            logger.id = run.name
            is_set = True
    return is_set


def _get_field(config: Any, name: str) -> Any:
    """Return a field of a configuration; None if it is missing or has a default factory (Fiddle raises ValueError)."""
    try:
        return getattr(config, name, None)
    except ValueError:
        return None
