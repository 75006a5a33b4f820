"""A user's own models, layouts, hardware, clusters and checks, from folders outside this package: collections.

A collection is a folder with any of the files in `KINDS`; docs/extending.md shows one of each. Its folders come from
the variable SUPERPOD_RECIPES (`recipes --recipes DIR` sets it, so that child processes see it too), and from installed
packages with an entry point in the group `superpod.recipes`, whose value names a package. Standard library only.
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
HARDWARE = "SUPERPOD_HARDWARE"
GROUP = "superpod.recipes"

KINDS = {
    "models": "models/*.py",
    "shapes": "shapes/*",
    "layouts": "layouts/*.toml",
    "modules": "modules/*.py",
    "hardware": "hardware.toml",
    "clusters": "clusters/*.toml",
    "checks": "checks/*.sh",
}
"""What a collection may hold, as patterns of file names.

`models` are Python files that register models here; `shapes` are their sizes, for the planner; `modules` is Python that
ranks import, such as NeMo configuration classes: it goes wherever a recipe runs, and needs nothing of this package.
"""


def add(*folders: Path) -> None:
    """Add folders to SUPERPOD_RECIPES, for this process and its children. Call it before anything reads a recipe.

    Raises:
        UserError: when one is no folder.
    """
    known = os.environ.get(VARIABLE, "").split(os.pathsep)
    absolute = [str(folder.absolute()) for folder in folders]
    if wrong := [folder for folder in absolute if os.pathsep in folder]:
        raise UserError(
            f"{wrong[0]} has a {os.pathsep!r} in its path, which separates folders in {VARIABLE}", "move it"
        )
    for folder in folders:
        _checked(folder, "--recipes")
    os.environ[VARIABLE] = os.pathsep.join([*filter(None, known), *absolute])


def use_hardware(path: Path) -> None:
    """Take a hardware file over all others, for this process and its children: what `--hardware` does in every verb.

    Unlike those of collections it may change hardware that is built in. Call it before anything reads hardware.
    """
    os.environ[HARDWARE] = str(path.absolute())


def own_hardware() -> Path | None:
    """The file of `use_hardware`."""
    path = os.environ.get(HARDWARE)
    return Path(path) if path else None


def folders() -> tuple[Path, ...]:
    """The collections: those of SUPERPOD_RECIPES in its order, then those of installed packages by name.

    Raises:
        UserError: when SUPERPOD_RECIPES names something that is no folder.
    """
    return _folders(os.environ.get(VARIABLE, ""), tuple(sys.path))


@lru_cache(maxsize=8)
def _folders(variable: str, path: tuple[str, ...]) -> tuple[Path, ...]:
    named = [_checked(Path(name), VARIABLE).absolute() for name in variable.split(os.pathsep) if name]
    return tuple(dict.fromkeys([*named, *_installed(path)]))


def _checked(folder: Path, where: str) -> Path:
    hint = "name the folder that holds models/, layouts/ or hardware.toml"
    if not folder.is_dir():
        kind = "is a file, not a folder" if folder.exists() else "does not exist"
        raise UserError(f"{where} {folder}: it {kind}", hint)
    if not any(True for pattern in KINDS.values() for _ in folder.glob(pattern)):
        names = {pattern.partition("/")[0] for pattern in KINDS.values()}
        near = (did_you_mean(entry.name, sorted(names - {entry.name})) for entry in sorted(folder.iterdir()))
        hint = next(filter(None, near), "") or f"it may hold {', '.join(KINDS.values())}: docs/extending.md"
        raise UserError(f"{where} {folder}: it holds nothing of a collection", hint)
    return folder


def files(kind: str) -> list[Path]:
    """Files of a kind (of `KINDS`) in every collection, by collection and then by name. Hidden files are left out."""
    paths = (path for folder in folders() for path in sorted(folder.glob(KINDS[kind])))
    ours = [path for path in paths if path.is_file() and not path.name.startswith((".", "_"))]
    own = own_hardware() if kind == "hardware" else None
    return [*ours, own] if own else ours


def by_name(kind: str, ours: dict[str, Path]) -> dict[str, Path]:
    """Files of a kind by their name without suffix, after `ours`.

    Raises:
        UserError: when two have the same name.
    """
    named = dict(ours)
    for path in files(kind):
        if path.stem in named:
            raise UserError(f"{path}: {named[path.stem]} has that name already", "rename yours")
        named[path.stem] = path
    return named


def all_files() -> Iterator[tuple[str, Path]]:
    """(name, file) of all that the collections hold, whatever its kind: what a cache of their recipes depends on."""
    for folder in folders():
        for path in sorted(folder.rglob("*")):
            place = path.relative_to(folder)
            if path.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in place.parts):
                yield f"{folder}\0{place}", path
    if own := own_hardware():
        yield "hardware of --hardware", own


def carried() -> dict[str, Path]:
    """What a job carries of the collections: its path in the job's code folder -> the file here."""
    own = {f"superpod/slurm/checks/{path.name}": path for path in checks().values()}
    return own | {path.name: path for path in modules()}


def checks(ours: Iterable[str] = ()) -> dict[str, Path]:
    """Checks of a node by name.

    Raises:
        UserError: when two have the same name, one has a name of `ours`, or one that is not a plain word: a check
            becomes a shell function on the nodes.
    """
    taken = dict.fromkeys(("node", *ours), Path("slurm/checks/node.sh"))
    own = {name: path for name, path in by_name("checks", taken).items() if name not in taken}
    for name, path in own.items():
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
            raise UserError(f"{path}: a check cannot be called {name!r}", "use letters, digits, _ and -")
    return own


def modules() -> list[Path]:
    """Python files of the collections that ranks import.

    Raises:
        UserError: when two have the same name, or one hides a module of Python, of a job, or of an installed package.
            Ranks find the job's folder first, this machine finds the package first: they would import two things.
    """
    taken = {"superpod", "recipe", "nemo", "nemo_run", "megatron", "torch", "lightning", *sys.stdlib_module_names}
    for name, path in by_name("modules", {}).items():
        if name in taken or not name.isidentifier() or _is_installed(name, path):
            raise UserError(f"{path}: a module cannot be called {name}", "name it after your company or project")
    return files("modules")


def _is_installed(name: str, path: Path) -> bool:
    """Whether `import NAME` would find something else than the file at `path`."""
    spec = importlib.util.find_spec(name)
    return spec is not None and Path(spec.origin or "").resolve() != path.resolve()


def make_importable() -> None:
    """Let this process and its children import what is in `modules/`."""
    for folder in dict.fromkeys(str(path.parent) for path in modules()):
        if folder not in sys.path:
            sys.path.append(folder)
            inherited = os.environ.get("PYTHONPATH")
            os.environ["PYTHONPATH"] = f"{inherited}{os.pathsep}{folder}" if inherited else folder


def _installed(path: tuple[str, ...]) -> Iterator[Path]:
    """Folders of the packages that name themselves in the entry-point group.

    Reads the files that importlib.metadata reads, which takes 0.1 s to import, where this takes 2 ms.
    """
    packages: dict[str, str] = {}
    for place in dict.fromkeys(path):
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(place or ".")):
                if name.endswith((".dist-info", ".egg-info")):
                    packages.update(_entries(Path(place, name, "entry_points.txt")))
    for name, package in sorted(packages.items()):
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            spec = None
        locations = list(spec.submodule_search_locations or []) if spec else []
        if not locations:
            hint = "the entry point's value is the name of an installed package; correct it, or uninstall it"
            raise UserError(f"entry point {name} of {GROUP}: {package} is no package", hint)
        yield Path(locations[0])


def _entries(file: Path) -> dict[str, str]:
    """Name -> package of a distribution's entry points in our group."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    section = text.partition(f"[{GROUP}]")[2].partition("\n[")[0]
    pairs = (line.partition("=") for line in section.splitlines())
    return {name.strip(): package.strip() for name, equals, package in pairs if equals}
