"""The rules of the house, as functions over a tree: each returns what breaks it, so that a planted fault is found."""

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
"""Each imports only those before it, and `errors`."""
ALLOWED = {name: {*FOLDERS[: i + 1]} for i, name in enumerate(FOLDERS)}
KNOWS_NEMO = ("collection/declarations.py", "nemo2/", "weights/", "data/", "rehearsal/")
NEMO = ("nemo", "megatron", "transformer_engine")
COPIED_LINES = 6
CODE = (PACKAGE, "tests", "benchmarks", "scripts")


def imports(path: Path, *, executed: bool = False) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import in the file, those inside functions too.

    Args:
        path: a Python file.
        executed: without imports that only the type checker reads.
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
    """Imports against the order of `FOLDERS`, of NeMo where nobody should know it, and of torch in the planner."""
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
                    broken.append(f"{name}:{line} imports {module}: only {' and '.join(KNOWS_NEMO)} know NeMo")
                if folder == "planner" and top in ("torch", "nemo_run", "lightning"):
                    broken.append(f"{name}:{line} imports {module}: the planner runs where there is none")
                if top in ALLOWED:
                    broken.append(f"{name}:{line} imports {module}: say superpod.{module}")
    return sorted(set(broken))


def import_cycle(root: Path) -> list[str]:
    """The modules of one cycle of imports, those inside functions too, first and last the same; empty without one.

    Imports under `if TYPE_CHECKING:` do not count: they are not executed.
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
    """Imports of our modules in strings, such as those given to `python -c`, of modules that do not exist."""
    broken = []
    for folder in CODE:
        for path in sorted((root / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Constant) and isinstance(node.value, str) and node.col_offset):
                    continue  # a docstring of a module begins at column 0
                for module, name in re.findall(r"\bfrom superpod([.\w]*) import (\w+)", node.value):
                    place = (root / PACKAGE).joinpath(*module.split("."))
                    init = place / "__init__.py"
                    is_module = (place / name).is_dir() or (place / f"{name}.py").is_file()
                    source = init if place.is_dir() else place.with_suffix(".py")
                    if not is_module and not (source.is_file() and name in source.read_text()):
                        broken.append(f"{path.relative_to(root)}:{node.lineno} imports superpod{module}.{name}")
    return broken


def copies(folder: Path, least: int = COPIED_LINES) -> list[str]:
    """Runs of `least` code lines that stand in two places of the recipe files."""
    seen: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        lines = [(n, text) for n, text in enumerate(map(str.strip, path.read_text().splitlines()), 1) if _is_code(text)]
        for start in range(len(lines) - least + 1):
            run = tuple(text for _, text in lines[start : start + least])
            seen[run].append(f"{path.relative_to(folder)}:{lines[start][0]}")
    return [f"{a} stands again at {b}" for places in seen.values() for a, b in pairwise(places)]


def _is_code(line: str) -> bool:
    return not re.fullmatch(r"(#.*|from .*|import .*|[\])}\s,:]*)", line)


def unregistered(recipes: Path, order: Iterable[str]) -> list[str]:
    """Models without a layout or in two files, layouts without a model, and families of ORDER that have no file."""
    families: dict[str, list[str]] = defaultdict(list)
    for path in sorted((recipes / "models").glob("[!_]*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("model" in ast.unparse(d) for d in node.decorator_list):
                families[node.name].append(path.name)
    layouts = {path.stem for path in (recipes / "layouts").glob("*.toml")}
    missing = [
        f"{name} of {files[0]} has no layouts/{name}.toml" for name, files in families.items() if name not in layouts
    ]
    unknown = [f"layouts/{name}.toml is of no model" for name in sorted(layouts - set(families))]
    twice = [f"{name} is in {' and '.join(files)}" for name, files in families.items() if len(files) > 1]
    gone = [
        f"ORDER names {name}, and there is no {name}.py"
        for name in order
        if not (recipes / f"models/{name}.py").exists()
    ]
    return missing + unknown + twice + gone


def long_files(root: Path, most: int = 500, function: int = 80) -> list[str]:
    """Files and functions longer than anyone reads in one go."""
    broken = []
    for folder in CODE:
        for path in sorted((root / folder).rglob("*.py")):
            name, text = path.relative_to(root).as_posix(), path.read_text()
            if len(text.splitlines()) > most:
                broken.append(f"{name} has {len(text.splitlines())} lines")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef) and (size := (node.end_lineno or 0) - node.lineno + 1) > function:
                    broken.append(f"{name}: {node.name} has {size} lines")
    return broken


def compared_names(root: Path, names: Container[str]) -> list[str]:
    """Comparisons with one of `names`, those of GPUs and generations: what differs between them is data, not code.

    Published rows are read as their sources wrote them (planner/tables/), so these may ask for a name.
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
                    broken += [f"{path.relative_to(root)}:{node.lineno} asks for {w}" for w in words if w in names]
    return broken


def commands(page: Path) -> list[tuple[int, list[str]]]:
    """The `recipes ...` and `make ...` lines in a page's code blocks, as (line, words)."""
    import shlex

    shown, inside = [], False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            inside = not inside
        code = line.removeprefix("    ") if not inside and line.startswith("    ") else line if inside else ""
        if re.match(r"(\$ )?(recipes|make) [a-z-]", code):
            shown.append((number, shlex.split(code.removeprefix("$ ").removesuffix("\\"), comments=True)))
    return shown
