"""Find the parameters of functions and classes, including those that bases accept for `**kwargs`."""

from __future__ import annotations

import inspect
from typing import Any


def find_parameter(target: Any, name: str) -> inspect.Parameter | None:
    """Find a parameter of a function, or of the `__init__` of a class or its nearest base that has the parameter.

    `inspect.signature` of the class itself may return `(*args, **kwargs)` of a base's `__new__`, such as that of NeMo's
    IOMixin. Before Python 3.11.5 (python/cpython#105080), it always does; Debian 12 has 3.11.2.
    """
    for function in _functions(target):
        parameter = inspect.signature(inspect.unwrap(function)).parameters.get(name)
        if parameter is not None:
            return parameter
    return None


def _functions(target: Any) -> list[Any]:
    """Return the `__init__` of a class and of its bases in order, or the function itself."""
    if isinstance(target, type):
        return [base.__init__ for base in inspect.getmro(target)]
    return [target]


def parameters(target: Any) -> list[str]:
    """Return the parameter names of `target`, including those of bases to which it passes `**kwargs`."""
    names: list[str] = []
    for function in _functions(target):
        signature = inspect.signature(inspect.unwrap(function)).parameters.values()
        names += [p.name for p in signature if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]
        if not any(p.kind is p.VAR_KEYWORD for p in signature):
            break
    return list(dict.fromkeys(names))
