"""docs/causes.md is what its script writes from the table of causes."""

import importlib
import sys

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
cause_docs = importlib.import_module("cause_docs")


def test_the_page_is_the_table():
    """Write it anew: `python scripts/cause_docs.py`."""
    assert cause_docs.PAGE.read_text() == cause_docs.page()
