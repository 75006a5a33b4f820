"""Options that several verbs share, declared once: a dataclass whose fields are options takes a parameter's place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

NoForwardCheck = Annotated[
    bool, typer.Option("--no-forward-check", help="Do not hold imports and exports against transformers.")
]


def spread(
    options: type[Any], parameter: str, *without: str, name_first: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the decorated verb's `parameter` by the fields of the dataclass `options`, except those in `without`.

    A parameter of the verb that is called like a field takes the place of that field, which the verb's `options` then
    leave at its default. With `name_first`, the first field comes before the verb's own parameters.
    """

    def wrap(verb: Callable[..., None]) -> Callable[..., None]:
        own = dict(inspect.signature(verb, eval_str=True).parameters)
        shared = {name: option for name, option in _declared(options).items() if name not in without}
        passed = set(shared) - set(own)
        inner = [own.pop(name, option) for name, option in shared.items()]
        first = [inner.pop(0)] if name_first else []
        parameters = [*first, *(p for q in own.values() for p in (inner if q.name == parameter else [q]))]

        @wraps(verb)
        def call(**words: Any) -> None:
            values = options(**{name: words.pop(name) for name in passed & set(words)})
            verb(**{parameter: values}, **words)

        # Typer builds a command from a function's signature, and a dozen verbs share these options. Declaring them
        # once and rewriting the signature keeps every verb's options in one order, with one help text. Typer reads
        # both: the parameters from `__signature__`, their types from `__annotations__`.
        signature = inspect.Signature([p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters])
        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        return call

    return wrap


def _declared(options: type[Any]) -> dict[str, inspect.Parameter]:
    hints = get_type_hints(options, include_extras=True)
    declared = inspect.signature(options).parameters
    return {name: parameter.replace(annotation=hints[name]) for name, parameter in declared.items()}
