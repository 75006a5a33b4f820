"""Rules of the source tree, as functions that return the violations in a tree."""

import ast
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

PACKAGE = "src/superpod"
FOLDERS = (
    "common",
    "planner",
    "diagnosis",
    "runtime",
    "collection",
    "data",
    "nemo2",
    "bridge",
    "weights",
    "requests",
    "profiles",
    "reports",
    "rehearsal",
    "launch",
    "slurm",
    "pages",
    "cli",
)
"""Folders of the package in import order: each imports only those before it, and `errors`."""
ALLOWED = {name: {*FOLDERS[: i + 1]} for i, name in enumerate(FOLDERS)}
KNOWS_NEMO = ("collection/declarations.py", "nemo2/", "bridge/", "weights/", "data/", "rehearsal/")
NEMO = ("nemo", "megatron", "transformer_engine")
COPIED_LINES = 6
CODE = (PACKAGE, "tests", "benchmarks", "scripts")


def imports(path: Path, *, executed: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the line and the dotted module of every import in a file, including those inside functions.

    Args:
        path: a Python file.
        executed: skip imports for the type checker only.
    """
    tree = ast.parse(path.read_text())
    if executed:
        tree = _WithoutTypeChecking().visit(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{name.name}") for name in node.names)


class _WithoutTypeChecking(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        return node.orelse if "TYPE_CHECKING" in ast.unparse(node.test) else node


def wrong_way_imports(root: Path) -> list[str]:
    """Return imports against the order of `FOLDERS`, of NeMo outside of KNOWS_NEMO, and of torch in the planner."""
    broken = []
    for folder, allowed in ALLOWED.items():
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            for line, module in imports(path):
                top, _, rest = module.partition(".")
                ours = rest.partition(".")[0] if top == "superpod" else ""
                if ours in ALLOWED and ours not in allowed:
                    broken.append(f"{name}:{line} imports {module}")
                if top in NEMO and not name.startswith(KNOWS_NEMO):
                    broken.append(f"{name}:{line} imports {module}: only {' and '.join(KNOWS_NEMO)} may import NeMo")
                if folder == "planner" and top in ("torch", "nemo_run", "lightning"):
                    broken.append(f"{name}:{line} imports {module}: the planner must run without it")
                if top in ALLOWED:
                    broken.append(f"{name}:{line} imports {module}: write superpod.{module}")
    return sorted(set(broken))


def import_cycle(root: Path) -> list[str]:
    """Return the modules of an import cycle, the first repeated at the end; [] without a cycle.

    Imports inside functions count; imports under `if TYPE_CHECKING:` are not executed and do not count.
    """
    modules = {
        ".".join(("superpod", *path.relative_to(root).with_suffix("").parts)): path for path in root.rglob("*.py")
    }
    graph = {}
    for name, path in modules.items():
        names = {imported for _, imported in imports(path, executed=True)}
        graph[name] = names & modules.keys() - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as cycle:
        return cycle.args[1]
    return []


def missing_imports(root: Path) -> list[str]:
    """Return imports in strings, such as code for `python -c`, of modules of this package that do not exist."""
    broken = []
    for folder in CODE:
        for path in sorted((root / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Constant) and isinstance(node.value, str) and node.col_offset):
                    continue  # skip module docstrings, which begin at column 0
                for module, name in re.findall(r"\bfrom superpod([.\w]*) import (\w+)", node.value):
                    place = (root / PACKAGE).joinpath(*module.split("."))
                    init = place / "__init__.py"
                    is_module = (place / name).is_dir() or (place / f"{name}.py").is_file()
                    source = init if place.is_dir() else place.with_suffix(".py")
                    if not is_module and not (source.is_file() and name in source.read_text()):
                        broken.append(f"{path.relative_to(root)}:{node.lineno} imports superpod{module}.{name}")
    return broken


def copies(folder: Path, least: int = COPIED_LINES) -> list[str]:
    """Return places where at least `least` consecutive lines of code repeat those of another place."""
    seen: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        lines = [(n, text) for n, text in enumerate(map(str.strip, path.read_text().splitlines()), 1) if _is_code(text)]
        for start in range(len(lines) - least + 1):
            run = tuple(text for _, text in lines[start : start + least])
            seen[run].append(f"{path.relative_to(folder)}:{lines[start][0]}")
    return [f"{a} is repeated at {b}" for places in seen.values() for a, b in pairwise(places)]


def _is_code(line: str) -> bool:
    return not re.fullmatch(r"(#.*|from .*|import .*|[\])}\s,:]*)", line)


def unregistered(recipes: Path, order: Iterable[str]) -> list[str]:
    """Return models without a layout or in two files, layouts without a model, and families in ORDER without a file."""
    families: dict[str, list[str]] = defaultdict(list)
    for path in sorted((recipes / "models").glob("[!_]*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("model" in ast.unparse(d) for d in node.decorator_list):
                families[node.name].append(path.name)
    layouts = {path.stem for path in (recipes / "layouts").glob("*.toml")}
    missing = [
        f"{name} of {files[0]} has no layouts/{name}.toml" for name, files in families.items() if name not in layouts
    ]
    unknown = [f"layouts/{name}.toml has no model" for name in sorted(layouts - set(families))]
    twice = [f"{name} is in {' and '.join(files)}" for name, files in families.items() if len(files) > 1]
    gone = [
        f"ORDER names {name}, but {name}.py does not exist"
        for name in order
        if not (recipes / f"models/{name}.py").exists()
    ]
    return missing + unknown + twice + gone


def long_files(root: Path, most: int = 500, function: int = 80) -> list[str]:
    """Return files and functions that are longer than the limits in lines."""
    broken = []
    for folder in CODE:
        for path in sorted((root / folder).rglob("*.py")):
            name, text = path.relative_to(root).as_posix(), path.read_text()
            if len(text.splitlines()) > most:
                broken.append(f"{name} has {len(text.splitlines())} lines")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef):
                    size = (node.end_lineno or 0) - node.lineno + 1
                    if size > function:
                        broken.append(f"{name}: {node.name} has {size} lines")
    return broken


def compared_names(root: Path, names: Container[str]) -> list[str]:
    """Return comparisons with one of `names`, of GPUs and generations, whose differences belong in data files.

    planner/tables/ is exempt, because it reads published tables with the names of their sources.
    """
    broken = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            if path.is_relative_to(root / "planner" / "tables"):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Compare):
                    words = [
                        p.value for p in ast.walk(node) if isinstance(p, ast.Constant) and isinstance(p.value, str)
                    ]
                    broken += [f"{path.relative_to(root)}:{node.lineno} compares with {w}" for w in words if w in names]
    return broken


def commands(page: Path) -> list[tuple[int, list[str]]]:
    """Return the `recipes ...` and `make ...` commands in the code blocks of a page, as (line number, arguments)."""
    import shlex

    shown, inside = [], False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            inside = not inside
        code = ""
        if inside:
            code = line
        elif line.startswith("    "):
            code = line.removeprefix("    ")
        if re.match(r"(\$ )?(recipes|make) [a-z-]", code):
            shown.append((number, shlex.split(code.removeprefix("$ ").removesuffix("\\"), comments=True)))
    return shown
