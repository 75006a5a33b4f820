"""Shares options between commands: the fields of a dataclass become options of each command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

NoForwardCheck = Annotated[
    bool,
    typer.Option("--no-forward-check", help="Do not compare the logits of imported and exported models."),
]


def spread(
    options: type[Any], parameter: str, *without: str, name_first: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces one parameter of a command by the fields of the dataclass `options`.

    If the command itself has a parameter with the name of a field, that parameter takes precedence: its value is passed
    to the command, and the field has its default.

    Args:
        options: dataclass whose fields are annotated with Typer options.
        parameter: parameter of the command to replace; the command receives an instance of the dataclass for it.
        without: names of fields to leave out.
        name_first: put the first field, the name of a model or recipe, before all other parameters.
    """

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        own_parameters = dict(inspect.signature(command, eval_str=True).parameters)
        shared = {name: option for name, option in _field_parameters(options).items() if name not in without}
        shared_names = set(shared) - set(own_parameters)
        new_parameters = [own_parameters.pop(name, option) for name, option in shared.items()]

        parameters = [new_parameters.pop(0)] if name_first else []
        for own_parameter in own_parameters.values():
            if own_parameter.name == parameter:
                parameters += new_parameters
            else:
                parameters.append(own_parameter)

        @wraps(command)
        def call(**arguments: Any) -> None:
            values = options(**{name: arguments.pop(name) for name in shared_names & set(arguments)})
            command(**{parameter: values}, **arguments)

        set_parameters(call, parameters)
        return call

    return wrap


def set_parameters(command: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> None:
    """Set the parameters from which Typer builds a command, in the order of `--help`.

    Typer reads the parameters of a function from `__signature__`, and their types from `__annotations__`.
    """
    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    command.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}


def _field_parameters(options: type[Any]) -> dict[str, inspect.Parameter]:
    """Return the fields of a dataclass as parameters with resolved annotations."""
    hints = get_type_hints(options, include_extras=True)
    signature_parameters = inspect.signature(options).parameters
    return {name: parameter.replace(annotation=hints[name]) for name, parameter in signature_parameters.items()}
