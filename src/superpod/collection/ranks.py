"""Detect ranks started by NeMo-Run, and prevent scripts from starting experiments in them."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from superpod.errors import UserError

RUNNER = "nemo_run.core.runners.fdl_runner"
"""Main module of the ranks that NeMo-Run starts. It imports the script that created the experiment under the name
 `__external_main__` (nemo_run/run/experiment.py, maybe_load_external_main)."""


def is_rank() -> bool:
    """Return whether NeMo-Run has started this process as a rank of an experiment."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name == RUNNER


def refuse_experiments() -> None:
    """In a rank, make the creation of a NeMo-Run experiment raise an error. Other processes are not affected.

    A script without a `__main__` guard would start an experiment in every rank, recursively. NeMo-Run logs the error as
    a warning, and the rank continues with the training.
    """
    if is_rank():
        from nemo_run.run.experiment import Experiment

        Experiment.__init__ = _raise_error  # type: ignore[method-assign]


def _raise_error(*_: Any, **__: Any) -> NoReturn:
    raise UserError(
        "this script starts an experiment when it is imported, but NeMo-Run imports it in every rank; no experiment "
        "was started here",
        'move the code that starts it below `if __name__ == "__main__":`',
    )
