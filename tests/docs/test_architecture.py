"""docs/architecture.md leads to files that exist."""

import re

from tests.conftest import ROOT
from tests.source_rules import FOLDERS

PACKAGE = ROOT / "src" / "superpod"
PLACES = (PACKAGE, ROOT)
"""Where the paths of the page start: in the package, or at the top, such as `recipes/`."""
PAGE = (ROOT / "docs" / "architecture.md").read_text()
QUESTION = re.compile(r"^\| (?P<question>[^|]+\?) \| `(?P<path>[^`|]+)`(?: [^|]*)? \|$", re.MULTILINE)
"""A row of the table of questions: one question, one path, and a name within the file where that helps."""


def test_thirty_questions_have_one_file_each():
    rows = [match.groupdict() for match in QUESTION.finditer(PAGE)]
    assert len(rows) >= 30
    assert len({row["question"] for row in rows}) == len(rows)
    assert [row for row in rows if not any((place / row["path"]).exists() for place in PLACES)] == []


def test_every_row_of_the_table_is_a_question_with_a_path():
    table = PAGE.partition("| question | file |\n|---|---|\n")[2].partition("\n\n")[0]
    assert [line for line in table.splitlines() if not QUESTION.fullmatch(line)] == []


def test_the_names_beside_paths_stand_in_their_files():
    for path, names in re.findall(r"\? \| `([^`|]+)` ([^|]+) \|", PAGE):
        text = (PACKAGE / path).read_text()
        assert [name for name in re.findall(r"`(\w+)`", names) if name not in text] == [], path


def test_paths_to_megatron_exist():
    """The paths that a value takes from the command line to Megatron: at most five files each."""
    rows = re.findall(r"^\| `(\w+)` \| (`[^|]+) \|$", PAGE, re.MULTILINE)
    assert {value for value, _ in rows} == {"tp", "nodes", "gbs", "data"}
    for value, files in rows:
        paths = re.findall(r"`([\w./]+/[\w./]+)`", files)
        assert 1 < len(paths) <= 5, value
        assert [path for path in paths if not (PACKAGE / path).exists()] == [], value


def test_the_order_of_rooms_is_the_one_that_is_enforced():
    rooms = re.findall(r"^\| `(\w+)/` \|", PAGE, re.MULTILINE)
    assert tuple(rooms) == FOLDERS
