"""Import the model files of user collections. Errors in them are reported with file and line."""

from __future__ import annotations

import functools
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.common import collection
from superpod.errors import UserError

if TYPE_CHECKING:
    import nemo_run as run

PREFIX = "superpod_collection_"
"""Prefix of the module names of these files, which jobs cannot import."""


def import_models() -> None:
    """Import the model files of all user collections, which registers models. Raises UserError if one fails."""
    if collection.folders():
        collection.make_importable()
    for number, path in enumerate(collection.files("models")):
        _import_file(path, f"{PREFIX}{number}.{path.stem}")


def locate_errors(make: Callable[[], run.Config]) -> Callable[[], run.Config]:
    """Return the function of a model, wrapped so that its exceptions become `UserError`s with file and line."""

    @functools.wraps(make)
    def configure() -> run.Config:
        try:
            return make()
        except Exception as error:
            raise _as_user_error(error, Path(make.__code__.co_filename)) from error

    return configure


def _import_file(path: Path, name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Registered before it is executed: dataclasses look up their module by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _as_user_error(error, path) from error


def _as_user_error(error: Exception, path: Path) -> UserError:
    place = f"{path}:{_error_line(error, path)}"
    if isinstance(error, UserError):
        return UserError(f"{place}: {error}", error.hint)
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    hint = "see the example in docs/extending.md"
    if isinstance(error, ModuleNotFoundError):
        hint = "import NeMo inside the function of the model, and put your own modules into the folder modules/"
    return UserError(f"{place}: {type(error).__name__}: {message}", hint)


def _error_line(error: Exception, path: Path) -> int:
    """Return the line in file `path` at which an exception was raised, or of a syntax error."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno or 1
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return lines[-1] if lines and lines[-1] else 1
