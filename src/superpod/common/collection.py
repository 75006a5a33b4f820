"""Find collections: folders with a user's own models, layouts, hardware, clusters and node checks.

A collection contains any of the files in `KINDS`; docs/extending.md has an example of each. Collections are found
through the environment variable SUPERPOD_RECIPES, which `recipes --recipes DIR` sets also for child processes, and
through entry points of installed packages in the group `superpod.recipes`, whose value is the name of a package.
Standard library only.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from superpod.errors import UserError, did_you_mean

VARIABLE = "SUPERPOD_RECIPES"
"""Environment variable with the folders of collections, separated by colons."""
HARDWARE = "SUPERPOD_HARDWARE"
"""Environment variable with the file of `--hardware`."""
GROUP = "superpod.recipes"
"""Group of entry points that name packages with a collection."""

KINDS = {
    "models": "models/*.py",
    "shapes": "shapes/*",
    "layouts": "layouts/*.toml",
    "modules": "modules/*.py",
    "hardware": "hardware.toml",
    "clusters": "clusters/*.toml",
    "checks": "checks/*.sh",
}
"""Files of a collection by kind, as glob patterns.

`models` are Python files that register models; `shapes` are model sizes for the planner; `modules` are Python files
that ranks import, such as NeMo configuration classes. Modules are copied to every run and must not import this package.
"""


def add(*folders: Path) -> None:
    """Add folders to SUPERPOD_RECIPES for this process and its children. Must be called before recipes are read.

    Raises:
        UserError: a path is not the folder of a collection.
    """
    names = [name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]
    for folder in folders:
        if os.pathsep in str(folder.absolute()):
            raise UserError(
                f"{folder.absolute()} contains {os.pathsep!r}, which separates folders in {VARIABLE}",
                "move or rename the folder",
            )
        _check_folder(folder, "--recipes")
    os.environ[VARIABLE] = os.pathsep.join([*names, *(str(folder.absolute()) for folder in folders)])


def use_hardware(path: Path) -> None:
    """Apply a hardware file given by `--hardware` in this process and its children, after all other hardware files.

    Unlike the files of collections, it may change built-in hardware. Must be called before hardware is read.
    """
    os.environ[HARDWARE] = str(path.absolute())


def hardware_path() -> Path | None:
    """Return the file set by `use_hardware`; None if there is none."""
    path = os.environ.get(HARDWARE)
    return Path(path) if path else None


def folders() -> tuple[Path, ...]:
    """Return the folders of the collections: those in SUPERPOD_RECIPES in order, then installed packages by name.

    Raises:
        UserError: a path in SUPERPOD_RECIPES is not the folder of a collection.
    """
    return _folders(os.environ.get(VARIABLE, ""), tuple(sys.path))


@lru_cache(maxsize=8)
def _folders(variable: str, path: tuple[str, ...]) -> tuple[Path, ...]:
    folders = [_check_folder(Path(name), VARIABLE).absolute() for name in variable.split(os.pathsep) if name]
    return tuple(dict.fromkeys([*folders, *_find_installed(path)]))


def _check_folder(folder: Path, source: str) -> Path:
    """Return `folder` if it is a collection; otherwise raise UserError. `source` names the option or variable."""
    hint = "specify the folder that contains models/, layouts/ or hardware.toml"
    if not folder.is_dir():
        problem = "is a file, not a folder" if folder.exists() else "does not exist"
        raise UserError(f"{source} {folder} {problem}", hint)
    if any(True for pattern in KINDS.values() for _ in folder.glob(pattern)):
        return folder
    hint = f"it may contain {', '.join(KINDS.values())}: see docs/extending.md"
    known_names = {pattern.partition("/")[0] for pattern in KINDS.values()}
    for entry in sorted(folder.iterdir()):
        suggestion = did_you_mean(entry.name, sorted(known_names - {entry.name}))
        if suggestion:
            hint = suggestion
            break
    raise UserError(f"{source} {folder} contains no file of a collection", hint)


def files(kind: str) -> list[Path]:
    """Return the files of a kind in `KINDS`, sorted by collection and name, without hidden files."""
    paths = (path for folder in folders() for path in sorted(folder.glob(KINDS[kind])))
    files = [path for path in paths if path.is_file() and not path.name.startswith((".", "_"))]
    if kind == "hardware":
        hardware_file = hardware_path()
        if hardware_file:
            files.append(hardware_file)
    return files


def files_by_name(kind: str, built_in: dict[str, Path]) -> dict[str, Path]:
    """Return {name without suffix: path} for the files `built_in` and the files of a kind in all collections.

    Raises:
        UserError: two files have the same name.
    """
    files_by_name = dict(built_in)
    for path in files(kind):
        if path.stem in files_by_name:
            raise UserError(f"{path}: {files_by_name[path.stem]} already has this name", "rename your file")
        files_by_name[path.stem] = path
    return files_by_name


def all_files() -> Iterator[tuple[str, Path]]:
    """Yield a unique name and the path of every file in the collections: the dependencies of cached recipes."""
    for folder in folders():
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if path.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in name.parts):
                yield f"{folder}\0{name}", path
    hardware_file = hardware_path()
    if hardware_file:
        yield "hardware of --hardware", hardware_file


def job_files() -> dict[str, Path]:
    """Return {path in the job's code folder: path} for the files of the collections that a job needs."""
    node_checks = {f"superpod/slurm/checks/{path.name}": path for path in checks().values()}
    return node_checks | {path.name: path for path in modules()}


def checks(built_in: Iterable[str] = ()) -> dict[str, Path]:
    """Return {name: path} for the node checks in the collections.

    Raises:
        UserError: a check has the name of another check or of a built-in check in `built_in`, or its name cannot be
            the name of a shell function.
    """
    built_in_checks = dict.fromkeys(("node", *built_in), Path("slurm/checks/node.sh"))
    all_checks = files_by_name("checks", built_in_checks)
    user_checks = {name: path for name, path in all_checks.items() if name not in built_in_checks}
    for name, path in user_checks.items():
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
            raise UserError(f"{path}: {name!r} is not a valid name for a check", "use letters, digits, _ and -")
    return user_checks


def modules() -> list[Path]:
    """Return the Python files of the collections that ranks import.

    Raises:
        UserError: two modules have the same name, or one has the name of a module in the standard library, a job or an
            installed package. Ranks would import the copy of the job, but this machine the installed module.
    """
    reserved_names = {"superpod", "recipe", "nemo", "nemo_run", "megatron", "torch", "lightning"}
    reserved_names |= sys.stdlib_module_names
    for name, path in files_by_name("modules", {}).items():
        if name in reserved_names or not name.isidentifier() or _is_installed(name, path):
            message = f"{path}: {name} is not a valid module name, or another module has this name"
            raise UserError(message, "rename the file, for example after your project")
    return files("modules")


def _is_installed(name: str, path: Path) -> bool:
    """Return whether `import NAME` finds a different file from `path`."""
    spec = importlib.util.find_spec(name)
    return spec is not None and Path(spec.origin or "").resolve() != path.resolve()


def make_importable() -> None:
    """Add the modules of the collections to the import path of this process and its children."""
    for folder in dict.fromkeys(str(path.parent) for path in modules()):
        if folder not in sys.path:
            sys.path.append(folder)
            inherited_path = os.environ.get("PYTHONPATH")
            os.environ["PYTHONPATH"] = f"{inherited_path}{os.pathsep}{folder}" if inherited_path else folder


def _find_installed(path: tuple[str, ...]) -> Iterator[Path]:
    """Yield the folders of the packages that entry points of `GROUP` name, from the import path `path`.

    It reads the files entry_points.txt itself, which takes 2 ms: importing importlib.metadata takes 0.1 s.
    """
    packages: dict[str, str] = {}
    for location in dict.fromkeys(path):
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(location or ".")):
                if name.endswith((".dist-info", ".egg-info")):
                    packages.update(_read_entry_points(Path(location, name, "entry_points.txt")))
    for name, package in sorted(packages.items()):
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            spec = None
        locations = list(spec.submodule_search_locations or []) if spec else []
        if not locations:
            hint = "set the entry point to the name of an installed package, or uninstall the distribution"
            raise UserError(f"entry point {name} of {GROUP}: {package} is not a package", hint)
        yield Path(locations[0])


def _read_entry_points(file: Path) -> dict[str, str]:
    """Return {entry point: package} for the entry points of `GROUP` in a file entry_points.txt."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    section = text.partition(f"[{GROUP}]")[2].partition("\n[")[0]
    pairs = (line.partition("=") for line in section.splitlines())
    return {name.strip(): package.strip() for name, equals, package in pairs if equals}
