"""Whether this process is a rank that NeMo-Run has started, and what a script must not do there."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from superpod.errors import UserError

RUNNER = "nemo_run.core.runners.fdl_runner"
"""The module that NeMo-Run starts in every rank. It imports the script that has made the experiment, as
`__external_main__` (nemo_run/run/experiment.py, maybe_load_external_main)."""


def is_rank() -> bool:
    """Whether NeMo-Run has started this process as a rank of an experiment."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name == RUNNER


def refuse_experiments() -> None:
    """In a rank, refuse a further experiment: a script without a guard would start one in each, and those again.

    NeMo-Run logs the refusal as a warning, and the rank trains. Elsewhere this does nothing.
    """
    if is_rank():
        from nemo_run.run.experiment import Experiment

        Experiment.__init__ = _refuse  # type: ignore[method-assign]


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise UserError(
        "this script starts an experiment when it is imported, and NeMo-Run imports it in every rank; none is started "
        "here",
        'put what starts it under `if __name__ == "__main__":`',
    )
