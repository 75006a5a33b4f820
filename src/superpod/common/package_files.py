"""The files of this package, and the two folders of the project that belong to it: recipes/ and slurm/.

In a checkout, and so in an editable install, these two lie at the top, where a user looks for them. A wheel, and the
code folder of a job, has them in `superpod/included/`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
INCLUDED = ("recipes", "slurm")


def included(name: str) -> Path:
    """The folder `recipes` or `slurm`."""
    in_package = PACKAGE / "included" / name
    return in_package if in_package.is_dir() else PACKAGE.parents[1] / name


def files(folders: Iterable[str]) -> dict[str, Path]:
    """The files of folders of this package: path in the package -> file.

    `included/recipes` and `included/slurm` are folders of the package wherever they lie. "." has the package's own
    files, without those of its folders.
    """
    found: dict[str, Path] = {}
    for name in folders:
        if name == ".":
            found |= {path.name: path for path in sorted(PACKAGE.glob("*.py"))}
            continue
        folder = included(name.removeprefix("included/")) if name.startswith("included/") else PACKAGE / name
        for path in sorted(folder.rglob("*.*")):
            if path.is_file() and "__pycache__" not in path.parts:
                found[f"{name}/{path.relative_to(folder).as_posix()}"] = path
    return found


def name_of(path: Path) -> str | None:
    """How a reader calls a file: `nemo2/build/partial.py`, `recipes/models/llama.py`; None for a file of others."""
    real = path.resolve()
    for name in INCLUDED:
        if real.is_relative_to(included(name).resolve()):
            return f"{name}/{real.relative_to(included(name).resolve())}"
    return str(real.relative_to(PACKAGE)) if real.is_relative_to(PACKAGE) else None


def find(name: str) -> Path | None:
    """The file that `name_of` calls so; None where there is none."""
    first, _, rest = name.partition("/")
    path = included(first) / rest if first in INCLUDED and rest else PACKAGE / name
    return path if path.is_file() else None
