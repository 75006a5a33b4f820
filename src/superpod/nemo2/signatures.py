"""Find the parameters of functions and classes, including those that base classes accept through `**kwargs`."""

from __future__ import annotations

import inspect
from typing import Any


def find_parameter(target: Any, name: str) -> inspect.Parameter | None:
    """Return the parameter `name` of a function, or of a class: of the first `__init__` among its bases that has it.

    Return None if there is no such parameter. `inspect.signature` of a class may return `(*args, **kwargs)` of a base's
    `__new__`, such as that of NeMo's IOMixin; before Python 3.11.5 (python/cpython#105080), it always does.
    """
    for function in _functions(target):
        parameter = inspect.signature(inspect.unwrap(function)).parameters.get(name)
        if parameter is not None:
            return parameter
    return None


def _functions(target: Any) -> list[Any]:
    """Return [target] for a function; for a class, `__init__` of the class and its bases in resolution order."""
    if isinstance(target, type):
        return [base.__init__ for base in inspect.getmro(target)]
    return [target]


def parameters(target: Any) -> list[str]:
    """Return the parameter names of a function or class, including those of bases that receive its `**kwargs`."""
    names: list[str] = []
    for function in _functions(target):
        signature = inspect.signature(inspect.unwrap(function)).parameters.values()
        names += [p.name for p in signature if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]
        if not any(p.kind is p.VAR_KEYWORD for p in signature):
            break
    return list(dict.fromkeys(names))
