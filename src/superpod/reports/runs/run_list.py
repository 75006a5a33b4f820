"""The runs below a folder for runs. One that cannot be read is listed too, with the reason; nothing is written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from superpod.common.files import read_bytes
from superpod.errors import UserError
from superpod.runtime.runs import owner
from superpod.runtime.runs.run_folder import RunFolder

_NAME = re.compile(r"\d{8}T\d{6}Z-.+")
"""The name of a run folder: its time, and an id."""


@dataclass(frozen=True)
class ListedRun:
    """A run folder, its owner, and why it cannot be read; '' for one that can."""

    run: RunFolder
    user: str = "?"
    mine: bool = True
    """an owner that the file system cannot tell counts as this user"""
    problem: str = ""


def list_runs(folder: Path) -> list[ListedRun]:
    """Every run in `folder`, oldest first.

    Raises:
        UserError: the folder itself cannot be read.
    """
    try:
        recipes = _children(folder)
    except FileNotFoundError:
        raise UserError(
            f"there is no folder of runs at {folder}", "name a run, --runs DIR, or --cluster PROFILE"
        ) from None
    except NotADirectoryError:
        raise UserError(f"{folder} is no folder, so it holds no run", "name a run, or a folder of runs") from None
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}", "ask who owns it for permission") from None
    runs = [inspect_run(Path(path)) for recipe in recipes for path in _folders(recipe)]
    return sorted(runs, key=lambda run: run.run.path.name)


LAST = "last"
"""The word for the newest run."""


def resolve_run(text: str, runs: str = "runs") -> str:
    """The run folder that a word means: itself, or the newest run of a recipe's folder or of a folder of runs.

    `last` is the newest in `runs`. What else it is (a sweep, nothing, a path on another machine) comes back as it is.

    Raises:
        UserError: `last`, and there is no run in `runs`.
    """
    last = text == LAST and not Path(text).exists()
    folder = Path(runs if last else text)
    if (folder / "run.json").exists() or not folder.is_dir():
        inside: list[str] = []
    else:
        inside = [path for name in (str(folder), *_children(folder)) for path in _folders(name)]
    readable = [path for path in inside if (Path(path) / "run.json").is_file()]
    if readable:
        return max(readable, key=lambda path: Path(path).name)
    if last and os.path.lexists(folder) and not folder.is_dir():
        raise UserError(f"{runs} is no folder, so it holds no run", "name a run folder, or a folder of runs")
    if last:
        raise UserError(f"there is no run in {runs}", "name a run folder, or a folder of runs")
    return text


def _children(folder: Path) -> list[str]:
    return sorted(entry.path for entry in os.scandir(folder) if _is_folder(entry) and entry.name[0] != ".")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or into a folder that may not be read
        return False


def inspect_run(path: Path) -> ListedRun:
    """One run folder."""
    uid = owner.uid_of(path)
    return ListedRun(RunFolder(path.absolute()), owner.name_of(uid), owner.is_mine(path), _problem(path))


def _folders(recipe: str) -> Iterator[str]:
    """The run folders of a recipe; its own folder where that cannot be read."""
    try:
        entries = list(os.scandir(recipe))
    except OSError:
        yield recipe
        return
    for entry in entries:
        if _is_folder(entry) and (_NAME.fullmatch(entry.name) or os.path.isfile(os.path.join(entry.path, "run.json"))):
            yield entry.path


def _problem(path: Path) -> str:
    """Why a run cannot be read, in words; '' when it can. A folder without rights looks empty to a glob."""
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
