"""Pages lead somewhere: relative links and the paths of this repository that they name exist."""

import re

import pytest

from tests.conftest import ROOT
from tests.source_rules import FOLDERS, PACKAGE

HISTORY = {"docs/LOG.md"}
"""Names files that were renamed since."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "examples").glob("*/README.md"))
LINK = re.compile(r"\]\((?P<target>[^)#:]+)(?:#[^)]*)?\)")
PATH = re.compile(rf"`((?:{'|'.join((*FOLDERS, 'tests', 'scripts', 'benchmarks', 'src'))})/[\w./*]+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_of_a_page_exist(page):
    name = page.relative_to(ROOT).as_posix()
    text = page.read_text()
    assert [link for link in LINK.findall(text) if not (page.parent / link).exists()] == []
    paths = [] if name in HISTORY else [path for path in PATH.findall(text) if "MODEL" not in path]
    assert [path for path in paths if not any([*ROOT.glob(path), *(ROOT / PACKAGE).glob(path)])] == []
