"""What a proof depends on beside the recipes themselves: hashes of code, of data, and versions of libraries.

Code counts without its comments, docstrings and line breaks: they change no model.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from superpod import collection
from superpod.errors import UserError
from superpod.rehearsal.te import source

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("nemo_toolkit", "megatron-core", "nemo-run", "fiddle", "torch")
RESOLVES = ("planner/**/*.py", "planner/data/**/*", "recipes/**/*.py", "src/superpod/*.py")
"""What turns a recipe into a configuration, without the layout files: a recipe's layouts are in its own key."""
RESOLVES_LAST = "superpod.rehearsal.resolved"
BUILDS = "superpod.rehearsal.rank_models"
"""What builds a configuration's models. It takes recipes and layouts too, but only through what they resolve to."""
COUNTED = ("superpod.rehearsal.", "superpod.planner.")
FOLLOWED = ("superpod.rehearsal.", "superpod.planner.kernels")
"""Modules that count as part of what imports them, and those whose own imports count too."""


@cache
def versions() -> dict[str, str]:
    """Library -> its version.

    Raises:
        UserError: one of them is not installed.
    """
    source.folder()
    try:
        # Without a local label such as +cpu: shapes are the same, whatever torch was compiled for.
        installed = {name: importlib.metadata.version(name).partition("+")[0] for name in PACKAGES}
    except importlib.metadata.PackageNotFoundError as missing:
        raise UserError(
            f"a proof builds NeMo's models, and {missing.name} is not installed",
            "pip install -c constraints.txt -e '.[nemo]'; `recipes doctor` shows what is there",
        ) from missing
    return installed | {"transformer_engine": source.VERSION}


@cache
def of_resolving() -> str:
    """Hash of all on which a resolved configuration depends, beside its recipe: code, hardware, shapes, collections."""
    ours = {path for pattern in RESOLVES for path in ROOT.glob(pattern) if path.is_file()}
    return _hash(ours | imported(RESOLVES_LAST), dict(collection.all_files()))


@cache
def of_building() -> str:
    """Hash of all on which a build depends, beside its resolved configuration: code, and collections."""
    return _hash(imported(BUILDS), dict(collection.all_files()))


def _hash(paths: Iterable[Path], others: dict[str, Path]) -> str:
    total = hashlib.sha256(repr(sorted(versions().items())).encode())
    named = {path.relative_to(ROOT).as_posix(): path for path in paths if "__pycache__" not in path.parts}
    for name, path in sorted((named | others).items()):
        total.update(f"{name}\0{_content(path)}\0".encode())
    return total.hexdigest()[:24]


@cache
def _content(path: Path) -> str:
    """Hash of what a file does: of Python its syntax tree, of other files their bytes."""
    data = path.read_bytes()
    if path.suffix == ".py":
        data = ast.dump(_without_docstrings(ast.parse(data))).encode()
    return hashlib.sha256(data).hexdigest()


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [line for line in body if not _is_text(line)]  # type: ignore[attr-defined]
    return tree


def _is_text(line: object) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)


@cache
def imported(module: str) -> frozenset[Path]:
    """The file of a module and, of `COUNTED`, of all that it imports, directly or through others of `FOLLOWED`."""
    pending, files = [module], set[Path]()
    while pending:
        name = pending.pop()
        path = _file(name)
        if path is None or path in files:
            continue
        files.add(path)
        pending += [other for other in _imports(path) if name.startswith(FOLLOWED) and other.startswith(COUNTED)]
    return frozenset(files)


def _imports(path: Path) -> Iterator[str]:
    """Names that a file imports; where it puts one together, all beside it: `patches/registry.py` does, for patches."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            if node.args and isinstance(node.args[0], ast.JoinedStr):
                parent = ".".join(("superpod", *path.relative_to(ROOT).parent.parts))
                yield from (f"{parent}.{beside.stem}" for beside in path.parent.glob("*.py"))
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def _file(module: str) -> Path | None:
    """The file of a module of this project; None for a name inside one."""
    place = ROOT.joinpath(*module.split(".")[1:])
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)
