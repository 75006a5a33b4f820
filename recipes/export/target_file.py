"""Where an exported recipe goes: refused before anything is built, written whole or not at all. Needs no NeMo."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from superpod.errors import UserError

HIDDEN = {"nemo", "nemo_run", "megatron", "torch", "lightning", "fiddle", "recipe"} | set(sys.stdlib_module_names)
"""Modules that the file, or what it imports, imports: Python looks for them beside the file first."""


def check(path: Path, *, force: bool = False) -> None:
    """Refuse a name that no recipe can be exported to.

    Raises:
        UserError: when it is no Python file's, would hide a module, or there is a file already (without `force`).
    """
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise UserError(f"{path} is no name of a Python module", "name it like my_recipe.py")
    if path.stem in HIDDEN:
        raise UserError(f"a file called {path.name} would hide a module that it imports", "choose another name")
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"{path} cannot be a file: " + ("it is a folder" if path.is_dir() else "no such folder"))
    if path.exists() and not force:
        raise UserError(f"{path} is there already", "--force writes over it")


def write(text: str, path: Path, *, force: bool = False) -> None:
    """Write an exported file under another name, and rename it.

    Raises:
        UserError: as `check`, or when the folder cannot be written.
    """
    check(path, force=force)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as broken:
        raise UserError(f"{path} cannot be written: {broken.strerror}") from broken
    finally:
        partial.unlink(missing_ok=True)
