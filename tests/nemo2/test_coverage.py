"""Every recipe that NeMo ships has one here, or a reason."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
recipe_docs = importlib.import_module("recipe_docs")


def test_there_is_no_hole():
    rows = recipe_docs.coverage(json.loads(recipe_docs.STOCK.read_text()))
    assert len(rows) > 150
    assert [row[0] for row in rows if not row[2]] == ["hyena_base", "hyena_base"]
    assert all(reason != "a hole" for *_, reason in rows)


def test_a_recipe_that_is_new_in_nemo_would_be_a_hole():
    assert recipe_docs.coverage({"llama9_8b": ["pretrain"]}) == [("llama9_8b", "pretrain", "", "a hole")]
    assert recipe_docs.counterpart("llama3_8b_64k") == "llama3_8b_64k"
    assert recipe_docs.counterpart("llama3_8b_65k") == ""


@pytest.mark.long
@pytest.mark.nemo
def test_the_list_is_that_of_the_installed_nemo():
    code = (
        f"import sys, json; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import recipe_docs;"
        "print('LIST' + json.dumps(recipe_docs.stock_of_nemo()))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    assert json.loads(done.stdout.rpartition("LIST")[2]) == json.loads(recipe_docs.STOCK.read_text())


@pytest.mark.slow
def test_the_pages_are_those_of_the_recipes():
    """Generated anew, they say what is checked in: `python scripts/recipe_docs.py`."""
    for family in recipe_docs.PAGES:
        page = ROOT / "docs" / "recipes" / f"{family}.md"
        assert page.read_text() == recipe_docs.family_page(family), family
    assert (ROOT / "docs" / "recipes.md").read_text() == recipe_docs.index()
