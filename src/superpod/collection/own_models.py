"""Models of collections: their Python files imported, and what is wrong in one named by file and line."""

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
"""Modules of these files are called so: a job can import none of them."""


def load() -> None:
    """Import the files in `models/` of every collection, which registers their models.

    Raises:
        UserError: a file cannot be imported, with the line that fails.
    """
    if collection.folders():
        collection.make_importable()
    for number, path in enumerate(collection.files("models")):
        _import(path, f"{PREFIX}{number}.{path.stem}")


def guarded(make: Callable[[], run.Config]) -> Callable[[], run.Config]:
    """The function of a model, with its errors as `UserError`s that name its file and line."""

    @functools.wraps(make)
    def configure() -> run.Config:
        try:
            return make()
        except Exception as broken:
            raise _as_user_error(broken, Path(make.__code__.co_filename)) from broken

    return configure


def family(module: str) -> str:
    """The family of models that a module holds: its file's name."""
    return module.rpartition(".")[2]


def _import(path: Path, name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as broken:
        del sys.modules[name]
        raise _as_user_error(broken, path) from broken


def _as_user_error(broken: Exception, path: Path) -> UserError:
    place = f"{path}:{_line(broken, path)}"
    if isinstance(broken, UserError):
        return UserError(f"{place}: {broken}", broken.hint)
    message = broken.msg if isinstance(broken, SyntaxError) else str(broken)
    return UserError(f"{place}: {type(broken).__name__}: {message}", _next_move(broken))


def _line(broken: Exception, path: Path) -> int:
    """The last line of the file that the error passed, or that Python could not parse."""
    if isinstance(broken, SyntaxError) and broken.filename == str(path):
        return broken.lineno or 1
    lines = [frame.lineno for frame in traceback.extract_tb(broken.__traceback__) if frame.filename == str(path)]
    return lines[-1] if lines and lines[-1] else 1


def _next_move(broken: Exception) -> str:
    if isinstance(broken, ModuleNotFoundError):
        return "import NeMo, and what needs it, inside the model's function; put your own modules into modules/"
    return "docs/extending.md shows a file that works"
