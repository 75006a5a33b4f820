"""docs/architecture.md is true: its folders, order of imports, files and paths of values are those of the code."""

import re

from superpod.runtime.attempts import payload
from tests.conftest import ROOT
from tests.source_rules import FOLDERS, KNOWS_NEMO, imports

PACKAGE = ROOT / "src" / "superpod"
PLACES = (PACKAGE, ROOT)
"""Where the paths of the page start: in the package, or at the top level, such as `recipes/`."""
PAGE = (ROOT / "docs" / "architecture.md").read_text()
QUESTION = re.compile(r"^\| (?P<question>[^|]+\?) \| `(?P<path>[^`|]+)` \|$", re.MULTILINE)
FOLDER = re.compile(r"^\| `(?P<name>\w+)/` \| [^|]+ \| (?P<subfolders>[^|]*)\|$", re.MULTILINE)
MOST_FILES = 8
"""Longest path of a value."""


def test_every_question_has_one_existing_file():
    table = PAGE.partition("| question | file |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = [match.groupdict() for match in QUESTION.finditer(table)]
    assert len(rows) == len(table.splitlines()) > 100
    assert len({row["question"] for row in rows}) == len(rows)
    assert [row for row in rows if not any((place / row["path"]).exists() for place in PLACES)] == []


def test_folders_are_in_the_order_of_imports_with_all_their_subfolders():
    rows = {match["name"]: re.findall(r"`(\w+)`", match["subfolders"]) for match in FOLDER.finditer(PAGE)}
    assert tuple(rows) == FOLDERS
    for name, subfolders in rows.items():
        folders = [path for path in (PACKAGE / name).iterdir() if path.is_dir() and path.name != "__pycache__"]
        assert set(subfolders) == {path.name for path in folders if any(path.glob("*.*"))}, name


def test_folders_that_import_nemo_are_named():
    sentence = re.search(r"^Only (.*?) import NeMo", PAGE, re.MULTILINE | re.DOTALL)
    assert sentence is not None
    assert {*re.findall(r"`([^`]+)`", sentence[1])} == {*KNOWS_NEMO, "recipes/"}
    assert len(payload.COMMON) == 6  # as the page says


def test_each_file_of_a_path_is_connected_by_an_import():
    rows = re.findall(r"^\| `(\w+)` \| (`[^|]+) \|$", PAGE.partition("## The path of tp")[2], re.MULTILINE)
    assert {value for value, _ in rows} == {"tp", "nodes", "gbs", "data"}
    for value, listed in rows:
        files = re.findall(r"`([\w./]+)`", listed)
        assert 1 < len(files) <= MOST_FILES, value
        for number, file in enumerate(files[1:], 1):
            assert any(are_connected(file, before) for before in files[:number]), f"{value}: {file}"


def are_connected(one, other):
    """Whether one of two files imports the other."""
    return imports_module(one, other) or imports_module(other, one)


def imports_module(file, other):
    module = "superpod." + other.removesuffix(".py").replace("/", ".")
    return any(name == module or name.startswith(f"{module}.") for _, name in imports(PACKAGE / file))
