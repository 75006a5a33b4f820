"""Lists the runs in a folder of runs, including unreadable ones with the reason."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from superpod.common.json_files import read_bytes
from superpod.errors import UserError
from superpod.runtime.runs import owner
from superpod.runtime.runs.run_folder import RunFolder

_NAME = re.compile(r"\d{8}T\d{6}Z-.+")
"""Name of a run folder: the time of its creation, and an id."""
LAST = "last"
"""Argument for the newest run."""


@dataclass(frozen=True)
class ListedRun:
    """A run folder and its owner; `problem` is the reason if it cannot be read, else ""."""

    run: RunFolder
    user: str = "?"
    mine: bool = True
    """whether this user owns it, or the owner is unknown"""
    problem: str = ""


def list_runs(folder: Path) -> list[ListedRun]:
    """Return the runs in a folder of runs, oldest first. Raises UserError if the folder cannot be read."""
    try:
        recipes = _list_subfolders(folder)
    except FileNotFoundError:
        hint = "specify a run, --runs DIR, or --cluster PROFILE"
        raise UserError(f"the folder of runs {folder} does not exist", hint) from None
    except NotADirectoryError:
        raise UserError(f"{folder} is not a folder of runs", "specify a run, or a folder of runs") from None
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}", "ask its owner for permission") from None
    runs = [inspect_run(Path(path)) for recipe in recipes for path in _find_run_folders(recipe)]
    return sorted(runs, key=lambda run: run.run.path.name)


def resolve_run(text: str, runs: str = "runs") -> str:
    """Return the newest run in a folder of a recipe or a folder of runs, or in `runs` if `text` is "last".

    Any other text, such as a run folder, a sweep or a path on another machine, is returned unchanged.

    Raises:
        UserError: `text` is "last", and there is no run in `runs`.
    """
    is_last = text == LAST and not Path(text).exists()
    folder = Path(runs if is_last else text)
    candidates: list[str] = []
    if folder.is_dir() and not (folder / "run.json").exists():
        candidates = [path for name in (str(folder), *_list_subfolders(folder)) for path in _find_run_folders(name)]
    readable = [path for path in candidates if (Path(path) / "run.json").is_file()]
    if readable:
        return max(readable, key=lambda path: Path(path).name)
    if is_last:
        exists = os.path.lexists(folder) and not folder.is_dir()
        problem = f"{runs} is not a folder of runs" if exists else f"there is no run in {runs}"
        raise UserError(problem, "specify a run folder, or a folder of runs")
    return text


def _list_subfolders(folder: Path) -> list[str]:
    return sorted(entry.path for entry in os.scandir(folder) if _is_folder(entry) and entry.name[0] != ".")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a symbolic link to itself, or into an unreadable folder
        return False


def inspect_run(path: Path) -> ListedRun:
    """Return the run in a folder with its owner, and the reason if it cannot be read."""
    uid = owner.owner_uid(path)
    return ListedRun(RunFolder(path.absolute()), owner.user_name(uid), owner.is_mine(path), _explain_unreadable(path))


def _find_run_folders(recipe: str) -> Iterator[str]:
    """Yield the run folders in the folder of a recipe, or that folder if it cannot be read."""
    try:
        entries = list(os.scandir(recipe))
    except OSError:
        yield recipe
        return
    for entry in entries:
        if _is_folder(entry) and (_NAME.fullmatch(entry.name) or os.path.isfile(os.path.join(entry.path, "run.json"))):
            yield entry.path


def _explain_unreadable(path: Path) -> str:
    """Return why a run cannot be read; "" if it can. Subfolders are checked, because glob skips unreadable ones."""
    try:
        list(os.scandir(path))
        if not read_bytes(path / "run.json"):
            return "run.json is empty"
        for name in ("attempts", "checkpoints"):
            if (path / name).exists():
                list(os.scandir(path / name))
        RunFolder.open(path)
    except UserError as error:
        return f"{error}; {error.hint}" if error.hint else str(error)
    except FileNotFoundError as error:
        return f"{Path(error.filename or path).name} is missing"
    except OSError as error:
        return f"{Path(error.filename or path).name} cannot be read: {error.strerror}"
    return ""
