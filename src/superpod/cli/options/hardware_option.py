"""The option `--hardware FILE`, and a decorator for commands without planning options that applies it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from superpod.cli.options.shared_options import set_parameters

HardwareFile = Annotated[
    Path | None,
    typer.Option("--hardware", help="TOML file with further GPUs, nodes or fabrics, or from `recipes calibrate`."),
]


def use_hardware(path: Path) -> None:
    """Make the planner use a hardware file for the rest of this process. Raises UserError if the file is invalid."""
    from superpod.common import collection
    from superpod.planner import hardware

    hardware.load(path)  # so that an error message names this file
    collection.use_hardware(path)
    hardware.builtin.cache_clear()  # `load` has cached the built-in tables without this file


def with_hardware(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the additional option --hardware, which `use_hardware` applies before the command runs."""

    @wraps(command)
    def call(**arguments: Any) -> None:
        path = arguments.pop("hardware", None)
        if path is not None:
            use_hardware(path)
        command(**arguments)

    parameters = inspect.signature(command, eval_str=True).parameters.values()
    option = inspect.Parameter("hardware", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=HardwareFile)
    set_parameters(call, [*parameters, option])
    return call
