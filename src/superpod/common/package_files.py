"""Find files of this package, including the folders recipes/ and slurm/ of the project.

In a checkout or an editable install, these two folders are at the top level of the repository. In a wheel and in the
code folder of a job, they are in `superpod/included/`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
INCLUDED = ("recipes", "slurm")


def included_folder(name: str) -> Path:
    """Return the path of the project's folder `recipes` or `slurm`."""
    in_package = PACKAGE / "included" / name
    return in_package if in_package.is_dir() else PACKAGE.parents[1] / name


def files(folders: Iterable[str]) -> dict[str, Path]:
    """Return {path in the package: path} for the files in folders of this package.

    Args:
        folders: names of folders, such as `included/recipes`; "." = the Python files at the top level of the package.
    """
    found: dict[str, Path] = {}
    for name in folders:
        if name == ".":
            found |= {path.name: path for path in sorted(PACKAGE.glob("*.py"))}
            continue
        folder = included_folder(name.removeprefix("included/")) if name.startswith("included/") else PACKAGE / name
        for path in sorted(folder.rglob("*.*")):
            if path.is_file() and "__pycache__" not in path.parts:
                found[f"{name}/{path.relative_to(folder).as_posix()}"] = path
    return found


def display_name(path: Path) -> str | None:
    """Return the name of a project file, such as `nemo2/build/partial.py`; None for files outside the project."""
    real_path = path.resolve()
    for name in INCLUDED:
        folder = included_folder(name).resolve()
        if real_path.is_relative_to(folder):
            return f"{name}/{real_path.relative_to(folder)}"
    return str(real_path.relative_to(PACKAGE)) if real_path.is_relative_to(PACKAGE) else None


def find(name: str) -> Path | None:
    """Return the path of the file with a name from `display_name`; None if it does not exist."""
    first, _, rest = name.partition("/")
    path = included_folder(first) / rest if first in INCLUDED and rest else PACKAGE / name
    return path if path.is_file() else None
