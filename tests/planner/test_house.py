"""The planner's core knows hardware, models and layouts; where a benchmark row came from, only `tables/` knows."""

import ast
import re

from superpod.planner.hardware import builtin
from tests.conftest import ROOT

PLANNER = ROOT / "src" / "superpod" / "planner"
RELEASES = PLANNER / "calibration" / "releases.py"
CORE = [path for path in sorted(PLANNER.rglob("*.py")) if "tables" not in path.relative_to(PLANNER).parts]
SOURCES = r"vTrain|MLPerf|SimuMax|SC21|Korthikanti|dracooci|sail-sg|dgxc|verification card|contracts\.md|\b[ms]\d{4}\b"


def imported(text):
    """Modules that a file imports, and the names it takes of them."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


def test_the_core_does_not_import_the_readers_of_benchmark_rows():
    assert not [path.name for path in CORE if any("planner.tables" in name for name in imported(path.read_text()))]


def test_the_core_has_no_word_about_the_source_of_a_row():
    lines = [(path.name, line) for path in CORE if path != RELEASES for line in path.read_text().splitlines()]
    assert [line for line in lines if re.search(SOURCES, line[1])] == []


def test_only_one_file_names_releases_of_the_software():
    """Strings that select by release; sources in docstrings may name one."""
    named = re.compile(r"\d\d\.\d\d|NeMo 2\d")
    found = []
    for path in (*CORE, *sorted((PLANNER / "tables").glob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            compared = [*node.comparators, node.left] if isinstance(node, ast.Compare) else []
            keys = node.keys if isinstance(node, ast.Dict) else []
            texts = [part.value for part in (*compared, *keys) if isinstance(part, ast.Constant)]
            found += [(path.name, text) for text in texts if isinstance(text, str) and named.search(text)]
    assert {name for name, _ in found} <= {RELEASES.name}


def test_no_gpu_or_generation_is_compared_by_its_name():
    """Facts of a GPU are fields of `data/hardware.toml`: adding one touches no code."""
    hardware = builtin()
    names = {*hardware.generations, *hardware.gpus, *(alias for gpu in hardware.gpus.values() for alias in gpu.aliases)}
    nodes = [(path.name, node) for path in CORE for node in ast.walk(ast.parse(path.read_text()))]
    words = [(name, node.value) for name, node in nodes if isinstance(node, ast.Constant)]
    assert [word for word in words if isinstance(word[1], str) and word[1].lower() in names] == []
