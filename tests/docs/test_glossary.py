"""docs/glossary.md is alphabetical, and explains each term once and briefly."""

from tests.conftest import ROOT

PAGE = ROOT / "docs" / "glossary.md"
TERMS = [line.split("|")[1].strip().lower() for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]


def test_terms_are_sorted_and_said_once():
    assert len(set(TERMS)) == len(TERMS) > 50
    assert sorted(TERMS) == TERMS


def test_an_explanation_is_one_or_two_lines():
    assert max(map(len, PAGE.read_text().splitlines())) < 200
