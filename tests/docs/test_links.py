"""Links of the pages: targets, anchors and named paths exist, and every page is within two clicks of docs/tasks.md."""

import re

import pytest

from tests.conftest import ROOT
from tests.source_rules import FOLDERS, PACKAGE

HISTORY = {"docs/LOG.md"}
"""Pages that name files which have been renamed or removed since."""
EXAMPLES = {"src/superpod/cli/planning/parameters.py"}
"""Files that docs/extending.md adds."""
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
PAGES += sorted((ROOT / "examples").glob("*/README.md"))
LINK = re.compile(r"\]\((?P<target>[^)#:]*)(?:#(?P<anchor>[^):]+))?\)")
PATH = re.compile(rf"`((?:{'|'.join((*FOLDERS, 'tests', 'scripts', 'benchmarks', 'src'))})/[\w./*]+)`")
CLICKS = 2


def anchors(page):
    """The anchors of a page's headings, as GitHub generates them."""
    outside_code = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", outside_code, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page):
    """(target, anchor) of every relative link; the target of an anchor alone is the page itself."""
    for match in LINK.finditer(page.read_text()):
        target = (page.parent / match["target"]).resolve() if match["target"] else page
        yield target, match["anchor"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_anchors_and_paths_of_a_page_exist(page):
    missing = [target for target, _ in links(page) if not target.exists()]
    assert missing == []
    wrong = [(target.name, anchor) for target, anchor in links(page) if anchor and anchor not in anchors(target)]
    assert wrong == []
    name = page.relative_to(ROOT).as_posix()
    paths = [path for path in PATH.findall(page.read_text()) if "MODEL" not in path and path not in EXAMPLES]
    if name in HISTORY:
        paths = []
    assert [path for path in paths if not any([*ROOT.glob(path), *(ROOT / PACKAGE).glob(path)])] == []


def test_every_page_is_within_two_clicks_of_the_tasks():
    reached = {DOCS / "tasks.md"}
    for _ in range(CLICKS):
        for page in [page for page in reached if page.suffix == ".md"]:
            reached |= {target for target, _ in links(page)}
        # A link to a folder shows the pages in it.
        reached |= {page for folder in reached if folder.is_dir() for page in folder.glob("*.md")}
    assert [page.name for page in sorted(DOCS.rglob("*.md")) if page not in reached] == []
