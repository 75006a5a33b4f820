"""The file that a recipe is exported to: checked before anything is built, written in one step. Needs no NeMo."""

from __future__ import annotations

import sys
from pathlib import Path

from superpod.common import output_file
from superpod.errors import UserError

HIDDEN = {"nemo", "nemo_run", "megatron", "torch", "lightning", "fiddle", "recipe"} | set(sys.stdlib_module_names)
"""Modules that the file imports, directly or not. Python looks beside the file first, so its name must be another."""


def check(path: Path, *, force: bool = False) -> None:
    """Check that a recipe can be exported to `path`.

    Raises:
        UserError: it is not the name of a Python module, would hide one, the file exists (without `force`), or the
            folder takes no files.
    """
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise UserError(f"{path} is not the name of a Python module", "name it like my_recipe.py")
    if path.stem in HIDDEN:
        raise UserError(f"a file called {path.name} would hide a module that it imports", "choose another name")
    output_file.check_new(path, "--to", force=force)


def write(text: str, path: Path, *, force: bool = False) -> None:
    """Write an exported file completely or not at all.

    Raises:
        UserError: as `check`, or when the folder cannot be written.
    """
    check(path, force=force)
    output_file.write(path, text, "--to")
