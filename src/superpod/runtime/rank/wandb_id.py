"""One Weights & Biases run over all attempts of a run: its id is the run folder's name. Standard library only.

Lightning's WandbLogger passes `resume="allow"` by itself, so the id alone makes later attempts continue the curve.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOGGER = "WandbLogger"
"""Lightning's class, as a recipe configures it."""


def keep(log: Any, run: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Give the W&B loggers of `partial.log` the run's id; True when one has it.

    An id or version of the recipe's own wins, and so does WANDB_RUN_ID, which wandb reads by itself.
    """
    if environ.get("WANDB_RUN_ID"):
        return False
    loggers = [_given(log, "wandb"), *(_given(log, "extra_loggers") or [])]
    # A Fiddle configuration knows its class as __fn_or_cls__; anything else is left as it is.
    ours = [x for x in loggers if getattr(getattr(x, "__fn_or_cls__", None), "__name__", "") == LOGGER]
    free = [x for x in ours if not (_given(x, "id") or _given(x, "version"))]
    for logger in free:
        logger.id = run.name
    return bool(free)


def _given(config: Any, name: str) -> Any:
    """A field of a configuration; None where it has none. Fiddle raises ValueError for a default from a factory."""
    try:
        return getattr(config, name, None)
    except ValueError:
        return None
