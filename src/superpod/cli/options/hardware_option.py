"""`--hardware FILE` for verbs that have no planning options: taken before anything reads hardware."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

HARDWARE = "TOML with your own GPUs, nodes and fabrics, or from `recipes calibrate`."
HardwareFile = Annotated[Path | None, typer.Option("--hardware", help=HARDWARE)]


def use(path: Path) -> None:
    """Plan with a hardware file from here on. Raises UserError where it is none."""
    from superpod.common import collection
    from superpod.planner import hardware

    hardware.load(path)  # a file that is wrong is refused here, by its own name
    collection.use_hardware(path)
    hardware.builtin.cache_clear()


def with_hardware(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with the option; see `shared_options.spread` for what Typer reads."""

    @wraps(verb)
    def call(**words: Any) -> None:
        if (path := words.pop("hardware", None)) is not None:
            use(path)
        verb(**words)

    own = list(inspect.signature(verb, eval_str=True).parameters.values())
    option = inspect.Parameter("hardware", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=HardwareFile)
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in [*own, option]]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call
