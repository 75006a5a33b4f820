"""The parameters of functions and classes, through bases that take `**kwargs`."""

from __future__ import annotations

import inspect
from typing import Any


def parameter_of(target: Any, name: str) -> inspect.Parameter | None:
    """The parameter `name` of a function, or of a class's `__init__` or the nearest of its bases that has it.

    `inspect.signature` of a class may give `(*args, **kwargs)` of a base's `__new__`, as NeMo's IOMixin has one; always
    so before Python 3.11.5 (python/cpython#105080), which Debian 12's 3.11.2 is.
    """
    for function in [one.__init__ for one in inspect.getmro(target)] if isinstance(target, type) else [target]:
        if found := inspect.signature(inspect.unwrap(function)).parameters.get(name):
            return found
    return None


def parameters(target: Any) -> list[str]:
    """Names that `target` accepts: its own, and those of its bases as far as it passes `**kwargs` to them."""
    classes = inspect.getmro(target) if isinstance(target, type) else ()
    names: list[str] = []
    for function in [target.__init__ for target in classes] or [target]:
        signature = inspect.signature(inspect.unwrap(function)).parameters.values()
        names += [p.name for p in signature if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]
        if not any(p.kind is p.VAR_KEYWORD for p in signature):
            break
    return list(dict.fromkeys(names))
